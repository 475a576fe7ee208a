"""Which code of the real package makes which stage stale."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from traced import reached

from rlhf_core.fingerprint.modules import bound_names, dotted_name
from rlhf_core.fingerprint.reach import Package
from rlhf_core.fingerprint.stages import NEUTRAL, PACKAGE, fingerprint, stage_definition
from rlhf_core.stages.runtime.runner import STAGES

ROOT = Path(__file__).resolve().parents[2]
# Modules whose imports are computed: the stages themselves, and a user's functions.
COMPUTED_IMPORTS = {"__init__.py", "stages/runtime/runner.py", "runtime/user_function.py"}


def digests(root: Path) -> dict[str, str]:
    package = Package(root, PACKAGE, NEUTRAL)
    return {stage: package.digest(*stage_definition(stage)) for stage in STAGES}


def stale(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {stage for stage in STAGES if after[stage] != before[stage]}


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """The digests of the package as it is, wherever it lies."""
    return digests(ROOT)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package that a test may change."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=ignored))


def change_functions(path: Path, names: tuple[str, ...] = ()) -> None:
    """Add a statement to every function and method of a module, or of the definitions ``names``
    alone.
    """
    tree = ast.parse(path.read_text())
    for definition in tree.body:
        if names and getattr(definition, "name", "") not in names:
            continue
        for node in ast.walk(definition):
            if isinstance(node, ast.FunctionDef):
                node.body.append(ast.parse("1 + 1").body[0])
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


@pytest.mark.slow
def test_a_comment_anywhere_makes_nothing_stale(copy: Path, before: dict[str, str]) -> None:
    for path in copy.rglob("*.py"):
        path.write_text(path.read_text() + "\n# a comment\n")
    assert digests(copy.parent) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "names", "stages"),
    [
        (
            "ppo/losses.py",
            ("PolicyObjective", "clipped_surrogate", "correction_cap", "entropy_sign"),
            {"ppo"},
        ),
        ("ppo/losses.py", ("ValueObjective", "value_loss"), {"critic", "ppo"}),
        ("training/sft.py", (), {"base", "sft"}),
        ("stages/validate.py", (), {"validate"}),
        ("world/gold.py", (), {"collect", "evaluate"}),
        ("tracking/stage_run.py", (), set()),
    ],
)
def test_a_changed_module_makes_its_own_stages_stale_and_no_other(
    copy: Path, before: dict[str, str], module: str, names: tuple[str, ...], stages: set[str]
) -> None:
    change_functions(copy / module, names)
    assert stale(before, digests(copy.parent)) == stages


@pytest.mark.slow
def test_code_of_another_method_trains_no_policy_by_ppo_again(
    copy: Path, before: dict[str, str]
) -> None:
    change_functions(copy / "training/dpo.py", ("implicit_rewards", "dpo_loss", "DpoTask"))
    change_functions(copy / "ppo/rejection_sampling.py")
    assert stale(before, digests(copy.parent)) == set()
    changed = Package(copy.parent, PACKAGE, NEUTRAL)
    for method in ("dpo", "rejection_sampling"):
        assert changed.digest(*stage_definition("ppo", method)) != fingerprint("ppo", method)


@pytest.mark.slow
def test_a_changed_health_rule_makes_ppo_and_the_report_that_names_it_stale(
    copy: Path, before: dict[str, str]
) -> None:
    path = copy / "config/health.py"
    text = path.read_text()
    changed = re.sub(
        r'(Rule\("gradient_growing", \(Check\("policy_grad_norm", ">", )10\.0', r"\g<1>11.0", text
    )
    assert changed != text
    path.write_text(changed)
    assert stale(before, digests(copy.parent)) == {"ppo", "report"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [("report/templates/gates.html.j2", "report"), ("safety/prompts.yaml", "evaluate")],
)
def test_a_changed_template_makes_its_stage_stale(
    copy: Path, before: dict[str, str], name: str, stage: str
) -> None:
    template = copy / "evaluation" / name
    template.write_text(template.read_text() + "<p>more</p>\n")
    assert stale(before, digests(copy.parent)) == {stage}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in ("ppo", "report")])
def test_default_health_rules_concern_ppo_and_the_report(stage: str) -> None:
    assert "rlhf_core.config.health.DEFAULT_RULES" not in reached(stage)


@pytest.mark.slow
def test_modules_imported_by_a_computed_name_are_known() -> None:
    """Such a call cannot be followed; one more needs a look at what it may import."""
    computed = set()
    for path in (ROOT / PACKAGE).rglob("*.py"):
        names = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and not all(isinstance(argument, ast.Constant) for argument in node.args)
        }
        if names & {"import_module", "__import__", "resolve_name"}:
            computed.add(path.relative_to(ROOT / PACKAGE).as_posix())
    assert computed - {"fingerprint/modules.py"} == COMPUTED_IMPORTS


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BINDING = (
    *FUNCTION,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
)  # other statements count for whatever imports them
CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "model_post_init"}
# Functions of the package that making a definition calls. They build values; what two of them tell
# Great Expectations is held by the class that calls them, too.
CALLED_ON_IMPORT = {
    "_column_metric", "_in_all_columns", "_keys", "_row_metric", "_without",
    "names_in", "plain_arithmetic", "reward_stage",
}  # fmt: skip


def on_import(node: ast.AST) -> Iterator[ast.expr]:
    """What is called when a definition is made: in decorators, default values, class bodies and
    assigned values.
    """
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node.func
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, (*FUNCTION, ast.ClassDef)):
        yield from (each for each in node.decorator_list if not isinstance(each, ast.Call))
    if isinstance(node, FUNCTION):
        inner = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    for each in inner:
        yield from on_import(each)


def unfollowed(tree: ast.Module) -> set[str]:
    """What a module does that leads to code without naming it, or enters an object in a table
    without a statement.
    """
    found: set[str] = set()
    tables = {name for statement in tree.body for name in bound_names(statement)}
    for node in ast.walk(tree):
        match node:
            case ast.alias(name="*"):
                found.add("from … import *")
            case (
                ast.Call(func=ast.Name(id="globals" | "eval" | "exec" as name))
                | ast.Attribute(attr="__subclasses__" as name)
            ):
                found.add(name)
            case ast.ClassDef(name=name, keywords=[_, *_]):
                found.add(f"class {name}(…=…)")
            case ast.FunctionDef(name="__init_subclass__" | "__set_name__" as name):
                found.add(name)
            case ast.FunctionDef(name=name) if name in CONSTRUCTORS:
                for inner in ast.walk(node):
                    match inner:
                        case (
                            ast.Subscript(value=ast.Name(id=table), ctx=ast.Store())
                            | ast.Call(func=ast.Attribute(value=ast.Name(id=table)))
                        ) if table in tables and table.isupper():
                            found.add(f"{name}: {table}")
    return found


def test_nothing_is_reached_without_a_name() -> None:
    """A fingerprint follows names. What none leads to would change results unseen."""
    trees = {
        path: ast.parse(path.read_text())
        for path in (ROOT / PACKAGE).rglob("*.py")
        if path.name != "cli.py"
    }
    found = {path.name: unfollowed(tree) for path, tree in trees.items()}
    assert not any(found.values()), found
    functions = {
        node.name for tree in trees.values() for node in tree.body if isinstance(node, FUNCTION)
    }
    called = set()
    for path, tree in trees.items():
        if path.parent.name != "commands":
            statements = [each for each in tree.body if isinstance(each, BINDING)]
            called |= {
                dotted_name(callee)[-1:] for each in statements for callee in on_import(each)
            }
    assert {
        name for (name,) in called - {()} if name in functions or "register" in name
    } == CALLED_ON_IMPORT
