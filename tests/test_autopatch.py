"""T5FASTPATCH in the environment: unmodified programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import t5fastpatch
from t5fastpatch.registry import BUILTIN

ROOT = Path(t5fastpatch.__file__).parent.parent

MODEL = """
import torch, transformers
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).eval().half()
"""
SHOW = """
import sys
block, norm = type(model.encoder.block[0]), type(model.encoder.final_layer_norm)
import inspect
print("checked", "isinf" in inspect.unwrap(block.forward).__code__.co_names)
print("norm", norm.forward.__module__)
print("name", block.__name__, block.__mro__[0] is sys.modules[block.__module__].T5Block)
"""
PATCHED = ["checked False", "norm t5fastpatch.patches.layer_norm", "name T5Block True"]
STOCK = ["checked True", "norm transformers.models.t5.modeling_t5", "name T5Block True"]


def run(
    *command: str, variable: str | None = "skip_inf_check,layer_norm", cwd: Path | None = None, **environment: str
) -> tuple[list[str], list[str]]:
    """Standard output and our own lines of standard error."""
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **environment}
    variables = {**os.environ, **own, **({} if variable is None else {"T5FASTPATCH": variable})}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=variables, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), [line for line in done.stderr.splitlines() if line.startswith("t5fastpatch:")]


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(source: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("first", ["import t5fastpatch", "import transformers, t5fastpatch", ""])
def test_the_variable_patches_an_unmodified_program(script: Any, first: str) -> None:
    """Whether the package is imported before transformers, after, or by the start-up hook alone."""
    out, said = run(script(first + MODEL + SHOW))
    assert out == PATCHED
    assert len(said) == 1
    assert "skip_inf_check on (sites: 3)" in said[0]


def test_it_is_late_enough_after_the_model_too(script: Any) -> None:
    program = f"import sys; sys.path += {sys.path!r}\n" + MODEL + "import t5fastpatch\n" + SHOW
    out, said = run("-S", "-c", program)
    assert out == PATCHED
    assert len(said) == 1


def test_all_ways_together_are_one(script: Any) -> None:
    source = "import t5fastpatch" + MODEL + SHOW + "from t5fastpatch.autopatch import activate\nactivate()\n"
    source += "print(t5fastpatch.status(model)['layer_norm'].state.value)\n"
    out, said = run("-m", "t5fastpatch", "run", script(source))
    assert out == [*PATCHED, "on"]
    assert len(said) == 1


def test_quiet_says_nothing(script: Any) -> None:
    out, said = run(script(MODEL + SHOW), T5FASTPATCH_QUIET="1")
    assert out == PATCHED
    assert said == []


@pytest.mark.parametrize("variable", [None, ""])
def test_unset_changes_and_imports_nothing(script: Any, variable: str | None) -> None:
    program = "import sys; print([m for m in ('t5fastpatch', 'torch', 'wrapt', 'transformers') if m in sys.modules])\n"
    out, said = run(script(program + MODEL + SHOW), variable=variable)
    assert out == ["[]", *STOCK]
    assert said == []


def test_set_it_imports_neither_torch_nor_transformers(script: Any) -> None:
    out, said = run("-c", "import t5fastpatch, sys; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert out == ["False False"]
    assert said == []


def test_importing_the_package_does_not_import_torch() -> None:
    out, _ = run("-c", "import t5fastpatch, sys; print('torch' in sys.modules, 'wrapt' in sys.modules)", variable=None)
    assert out == ["False False"]


def test_a_wrong_name_is_one_line_and_the_program_runs_unpatched(script: Any) -> None:
    out, said = run(script(MODEL + SHOW), variable="layer_norm,softmax_dtyp")
    assert out == STOCK
    assert len(said) == 1
    for name in ("did you mean 'softmax_dtype'", "skip_inf_check", "layer_norm", "safe", "all"):
        assert name in said[0]


LOADED = """
import tempfile
import torch, transformers
from transformers import T5Config, T5ForConditionalGeneration
from t5fastpatch.install import patches_on, setup_on

torch.manual_seed(0)
config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
made = T5ForConditionalGeneration(config).eval()
with torch.no_grad():
    for name, parameter in made.named_parameters():
        if name.endswith("wo.weight"):
            parameter.mul_(2.0**13)
folder = tempfile.mkdtemp()
made.save_pretrained(folder)
half = {"dtype" if int(transformers.__version__[0]) > 4 else "torch_dtype": torch.float16}
model, info = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True, **half)
print(sorted({patch.name for module in made.modules() for patch in patches_on(module)}))
print(sorted({patch.name for module in model.modules() for patch in patches_on(module)}))
print(setup_on(model.encoder).scaling.stream < 1, {p.dtype for p in model.encoder.parameters()} == {torch.float16})
ids = torch.arange(2, 12)[None]
with torch.no_grad():
    true, found = (each.eval()(input_ids=ids, labels=ids).logits.float() for each in (made, model))
print(bool(torch.cosine_similarity(true, found, dim=-1).min() > 0.999))
"""


def test_a_preset_puts_on_what_is_proven_when_a_model_is_loaded(script: Any) -> None:
    out, said = run(script(LOADED), variable="safe")
    assert out == ["[]", "['fused_qkv', 'residual_rescale', 'skip_inf_check', 'wo_half']", "True True", "True"]
    assert len(said) == 2
    assert "skip_inf_check applies (decided for each model" in said[0]
    assert "skip_inf_check on" in said[1]


def test_patches_that_depend_on_the_weights_are_put_on_what_is_loaded_by_name(script: Any) -> None:
    out, said = run(script(LOADED), variable="residual_rescale,wo_half")
    assert out == ["[]", "['residual_rescale', 'wo_half']", "True True", "True"]
    assert "residual_rescale on" in said[1]
    assert "wo_half on" in said[1]


def test_loading_another_model_says_nothing(script: Any) -> None:
    other = """
    import tempfile, transformers, transformers.models.t5.modeling_t5
    from transformers import BertConfig, BertModel
    folder = tempfile.mkdtemp()
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(folder)
    print(type(BertModel.from_pretrained(folder)).__name__)
    """
    out, said = run(script(other), variable="safe")
    assert out == ["BertModel"]
    assert len(said) == 1


def test_what_is_unsafe_alone_is_not_in_all(script: Any) -> None:
    out, said = run(script(MODEL + SHOW), variable="all")
    assert out == ["checked True", PATCHED[1], PATCHED[2]]
    assert "skip_inf_check applies (decided for each model" in said[0]


def test_an_error_inside_never_reaches_the_program(script: Any) -> None:
    source = "import t5fastpatch.classwide\nt5fastpatch.classwide.enable = lambda *a: 1 / 0\n" + MODEL + SHOW
    out, said = run(script(source))
    assert out == STOCK
    assert len(said) == 1
    assert "t5 stays unpatched: division by zero" in said[0]


def test_child_processes_inherit_it(script: Any) -> None:
    child = script(MODEL + SHOW, "child.py")
    out, said = run(script(f"import subprocess, sys\nsubprocess.run([sys.executable, {child!r}], check=True)\n"))
    assert out == PATCHED
    assert len(said) == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_inherits_it(script: Any, method: str) -> None:
    source = f"""
    import multiprocessing

    def work():
        exec({MODEL + SHOW!r}, {{}})

    if __name__ == "__main__":
        process = multiprocessing.get_context({method!r}).Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
    """
    out, _ = run(script(source))
    assert out == PATCHED


IDENTITY = """
import sys, os, __main__
print(sys.argv)
print(sys.path[0])
print(__name__, __main__.__file__, __main__ is sys.modules["__main__"], vars(__main__) is globals())
import beside
"""


@pytest.mark.parametrize("options", [[], ["--flag", "-m", "--patches", "x"], ["--", "a b"]])
def test_run_gives_a_script_its_own_argv_path_and_main(script: Any, tmp_path: Path, options: list[str]) -> None:
    path = script(IDENTITY)
    script("", "beside.py")
    plain, _ = run(path, *options, cwd=tmp_path)
    ours, _ = run("-m", "t5fastpatch", "run", "--patches", "layer_norm", path, *options, cwd=tmp_path)
    assert ours == plain
    relative, _ = run("script.py", cwd=tmp_path)
    assert run("-m", "t5fastpatch", "run", "script.py", cwd=tmp_path)[0] == relative


def test_run_gives_a_module_its_own_argv_path_and_main(script: Any, tmp_path: Path) -> None:
    script(IDENTITY)
    script("", "beside.py")
    plain, _ = run("-m", "script", "-x", cwd=tmp_path)
    ours, _ = run("-m", "t5fastpatch", "run", "-m", "script", "-x", cwd=tmp_path, PYTHONPATH=pythonpath())
    assert ours[0] == plain[0]
    assert ours[1:] == plain[1:]


def pythonpath() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def test_run_works_without_start_up_hooks(script: Any) -> None:
    """As `-S` does, or a `pip install --target` on PYTHONPATH, or a bare checkout."""
    path = script(MODEL + SHOW)
    argv = ["run", "--patches", "skip_inf_check,layer_norm", path]
    launch = f"import sys; sys.path += {sys.path!r}; from t5fastpatch.cli import main; sys.exit(main({argv!r}))"
    out, said = run("-S", "-c", launch, variable=None)
    assert out == PATCHED
    assert len(said) == 1


def test_run_passes_the_exit_code_and_errors_on(script: Any) -> None:
    for source, code in (("import sys; sys.exit(7)", 7), ("raise KeyError('x')", 1), ("import sys; sys.exit('no')", 1)):
        command = [sys.executable, "-m", "t5fastpatch", "run", script(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code
    assert "no" in done.stderr


def test_run_with_a_wrong_name_starts_nothing(script: Any) -> None:
    command = [sys.executable, "-m", "t5fastpatch", "run", "--patches", "layer_nrm", script("print('ran')")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'layer_norm'" in done.stderr


def test_run_of_a_missing_script_is_one_line() -> None:
    command = [sys.executable, "-m", "t5fastpatch", "run", "nowhere.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: there is no script 'nowhere.py'"]


def test_process_wide_and_per_model_go_together(script: Any) -> None:
    source = (
        MODEL
        + """
    import copy, t5fastpatch
    print(t5fastpatch.status(model)["layer_norm"].why)
    t5fastpatch.apply(model, ["skip_inf_check", "layer_norm"])
    block, norm = type(model.encoder.block[0]), type(model.encoder.final_layer_norm)
    print("t5fastpatch" in vars(block), "t5fastpatch" in vars(norm))
    t5fastpatch.remove(model)
    print(type(model.encoder.block[0]).__mro__[0] is block.__mro__[1])
    try:
        t5fastpatch.remove(model)
    except t5fastpatch.NotAppliedError as error:
        print(error)
    """.replace("\n    ", "\n")
    )
    out, _ = run(script(source), variable="layer_norm")
    assert out[:3] == ["process-wide", "True False", "True"]
    assert "T5FASTPATCH" in out[3]


def test_gradient_checkpointing_still_checkpoints_process_wide(script: Any) -> None:
    source = (
        MODEL
        + """
model = model.float().train()
model.gradient_checkpointing_enable()
ran = []
for block in (*model.encoder.block, *model.decoder.block):
    block.layer[-1].register_forward_pre_hook(lambda *_: ran.append(1))
tokens = torch.arange(2, 12)[None]
model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
print(len(ran))
"""
    )
    assert run(script(source))[0] == ["8"]


PLUGIN = """
import ast, torch
from t5fastpatch import Contract, Role, SourcePatch

def edits(method):
    last = method.tree.body[-1].value
    return [method.replace(last, ast.unparse(last))]

patch = SourcePatch("third_party", "for a test", Contract.EXACT, Role.BLOCK, edits=edits, sites=1)
misnamed = SourcePatch("other_name", "for a test", Contract.EXACT, Role.BLOCK, edits=edits, sites=1)
"""


@pytest.fixture
def plugin(script: Any, tmp_path: Path) -> str:
    """An installed package that offers patches, good and bad; gives the PYTHONPATH under which it is seen."""
    script(PLUGIN, "plugin.py")
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    lines = ["third_party = plugin:patch", "renamed = plugin:misnamed", "broken = plugin_that_is_not_there:patch"]
    (info / "entry_points.txt").write_text("[t5fastpatch.patches]\n" + "\n".join(lines) + "\n")
    return os.pathsep.join([str(tmp_path), pythonpath()])


def test_another_packages_patch_is_applied_by_name(script: Any, plugin: str) -> None:
    _, said = run(script(MODEL), variable="third_party", PYTHONPATH=plugin)
    assert len(said) == 1
    assert "third_party on (sites: 1)" in said[0]


def test_another_packages_patch_is_not_imported_before_it_is_needed(script: Any, plugin: str) -> None:
    program = "import t5fastpatch, sys; print('plugin' in sys.modules, 'torch' in sys.modules)"
    out, said = run("-c", program, variable="third_party", PYTHONPATH=plugin)
    assert (out, said) == (["False False"], [])


def test_another_packages_broken_patch_is_left_out_with_a_line(script: Any, plugin: str) -> None:
    source = "import t5fastpatch\nprint([patch.name for patch in t5fastpatch.list_patches()])\n"
    out, said = run(script(source), variable=None, PYTHONPATH=plugin)
    assert out == [str([*BUILTIN, "third_party"])]
    assert len(said) == 2
    assert any("'renamed'" in line and "'other_name'" in line for line in said)
    assert any("'broken'" in line and "plugin_that_is_not_there" in line for line in said)
    _, said = run(script(MODEL), variable="broken", PYTHONPATH=plugin)
    assert len(said) == 1
    assert "t5 stays unpatched" in said[0]


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "sys.stderr = None", "import os; os.close(2)"])
def test_a_closed_stderr_does_not_matter(script: Any, closing: str) -> None:
    path = script(f"import sys\n{closing}\n" + MODEL + SHOW)
    if subprocess.run(
        [sys.executable, path], capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    ).returncode:
        pytest.skip("this release does not get along without a stderr itself")
    assert run(path)[0] == PATCHED


def test_run_overrides_the_variable(script: Any) -> None:
    out, said = run(
        "-m", "t5fastpatch", "run", "--patches", "skip_inf_check", script(MODEL + SHOW), variable="layer_norm"
    )
    assert out == [PATCHED[0], STOCK[1], PATCHED[2]]
    assert len(said) == 1


@pytest.mark.parametrize(
    "statement",
    ["raise EOFError('mine')", "raise KeyboardInterrupt", "import t5fastpatch; raise t5fastpatch.NotT5Error('mine')"],
)
def test_run_leaves_a_programs_errors_to_python(script: Any, statement: str) -> None:
    path = script(statement)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True)
    ours = subprocess.run([sys.executable, "-m", "t5fastpatch", "run", path], capture_output=True, text=True)
    assert ours.returncode == plain.returncode
    assert ours.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert "Traceback" in ours.stderr


def test_run_leaves_the_excepthook_alone(script: Any) -> None:
    out, _ = run("-m", "t5fastpatch", "run", script("import sys; print(sys.excepthook is sys.__excepthook__)"))
    assert out == ["True"]


TRAINER = """
import sys, torch, numpy
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

class Lines(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        row = torch.arange(2, 10) + i
        return dict(input_ids=row, attention_mask=torch.ones_like(row), labels=row[:5])

torch.manual_seed(0)
config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)
args = Seq2SeqTrainingArguments(
    output_dir=sys.argv[1], per_device_eval_batch_size=2, predict_with_generate=True, fp16_full_eval=True, report_to=[],
)
trainer = Seq2SeqTrainer(model=model, args=args, eval_dataset=Lines())
metrics = trainer.evaluate(max_length=8)
predictions = trainer.predict(Lines(), max_length=8).predictions
print(model.dtype, round(metrics["eval_loss"], 2), predictions.tolist())
"""


def test_transformers_own_trainer_evaluates_patched_in_fp16(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    path = script(TRAINER)
    try:
        stock, _ = run(path, str(tmp_path), variable=None, CUDA_VISIBLE_DEVICES="")
    except AssertionError as error:
        # The oldest releases' trainers do not run with the newest accelerate and numpy, patched or not.
        if "t5fastpatch" in str(error):
            raise
        pytest.skip(f"stock trainer does not run here: {str(error).strip().splitlines()[-1]}")
    patched, said = run(path, str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert stock[-1].startswith("torch.float16")
    assert patched[-1] == stock[-1]
    assert len(said) == 1
