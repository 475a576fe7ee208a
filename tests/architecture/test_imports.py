"""The house's contract: imports point downwards only, and what may not be reached is not
reached.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from rlhf_core.fingerprint.stages import stage_definition

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    {"__main__"},
    {"cli"},
    {"commands"},
    {"stages"},
    {"api", "serving", "probe"},
    {"forecast"},
    {"evaluation", "ppo"},
    {"sampling", "training"},
    {"models", "data", "world", "gates", "workload"},
    {"config", "tracking", "fingerprint", "hub"},
    {"runtime", "storage", "git", "plugins"},
    {"errors"},
    {"redaction"},
    {"secret_commands"},
)
FLOWS_LAYERS = (
    {"cli"},
    {"commands"},
    {"pipeline"},
    {"jobs", "registry"},
    {"stage"},
    {"prefect_server", "dvc_repo"},
    {"workspace"},
    {"supervision"},
)
# What flows uses of the core: these packages and modules, and single functions where a module asks
# for more.
FLOWS_MAY_USE = {
    "config",
    "gates",
    "errors",
    "redaction",
    "storage",
    "git",
    "plugins",
    "tracking",
    "__version__",
    "runtime.progress.busy",
}
FLOWS_MAY_ALSO_USE = {
    # It mounts the core's commands on its own command line.
    "flows.cli": {
        "cli",
        "commands.data",
        "commands.plugged",
        "stages.runtime.runner.workspace_root",
    },
    "flows.commands.options": {"commands.plugged"},
    "flows.commands.init_checker": {
        "data.collection.sources.read_sources",
        "data.schema.SPLITS",
        "data.schema.assign",
        "fingerprint.tracked_files.function_files",
        "fingerprint.tracked_files.missing_function",
    },
    "flows.commands.registry_commands": {"commands.data", "evaluation.losses"},
    "flows.commands.init": {
        "forecast.as_text",
        "stages.pair_supply.supply_of_files",
        "stages.run_forecasts",
        "models.foreign.open_starting_model",
        "models.readers.is_model_file",
        "models.readers.model_reader",
    },
    "flows.commands.text": {"data.text", "evaluation.remedies.remedies"},
    "flows.pipeline.artifacts": {"evaluation.remedies.remedy_for"},
    "flows.dvc_repo.recipe": {
        "fingerprint.tracked_files.function_files",
        "fingerprint.tracked_files.verifiable_functions",
    },
    "flows.stage": {"stages.runtime.kept_result", "stages.runtime.launcher"},
    "flows.commands.registry_output": {"evaluation.probe_table"},
    "flows.commands.machine_checks": {"commands.plugged", "runtime.machine"},
    "flows.commands.doctor": {
        "stages.pair_supply.supply_of_workspace",
        "stages.run_forecasts",
        "evaluation.report.metrics.page",
        "data.collection.sources.best_kind",
        "data.collection.sources.source_files",
        "fingerprint.tracked_files.missing_function",
        "fingerprint.tracked_files.model_folders",
        "fingerprint.tracked_files.verifiable_functions",
        "models.foreign.open_starting_model",
    },
    "flows.registry.stored_models": {"serving.protocol"},
    # What a registered model is answered by, wherever it is loaded.
    "flows.registry.model_pyfunc": {
        "serving",
        "evaluation.judges.model.ModelJudge",
        "evaluation.replies.Reply",
    },
    "flows.pipeline.data_watch": {
        "data.collection.sources.collected_paths",
        "data.collection.sources.reader_lines",
        "fingerprint.tracked_files.SOURCES_FILE",
        "fingerprint.tracked_files.describe_sources",
    },
    "flows.pipeline.verdict": {
        "evaluation.remedies.remedies",
        "evaluation.report.headline",
        "evaluation.report.note",
        "evaluation.verdict",
    },
    "flows.commands.run_state": {"evaluation.verdict"},
    "flows.commands.status": {
        "evaluation.report.headline.ReleaseDecision",
        "evaluation.verdict.failed_conditions",
    },
    "flows.registry.decisions": {"evaluation.promotion.Criterion"},
    "flows.registry.release_page": {
        "evaluation.promotion.Criterion",
        "evaluation.remedies.remedy_for",
        "evaluation.report.headline",
        "evaluation.report.view.with_release",
    },
    "flows.dvc_repo.inputs": {"data.collection.sources.collected_paths"},
    "flows.registry.promote": {
        "evaluation.judges.names.JUDGE",
        "evaluation.promotion",
        "fingerprint.tracked_files.code_lines",
        "fingerprint.tracked_files.verifiable_functions",
    },
    "flows.jobs.remote": {
        "fingerprint.tracked_files.function_files",
        "fingerprint.tracked_files.verifiable_functions",
    },
}
ORCHESTRATORS = {"prefect", "dvc", "flows"}
EXTRAS_PACKAGE = "rlhf_extras"


def modules(package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def rooms_used(path: Path, package: str = "rlhf_core") -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")}


def layer(room: str, layers: tuple[set[str], ...] = LAYERS) -> int:
    return next((i for i, rooms in enumerate(layers) if room in rooms), len(layers))


CORE = modules("rlhf_core")
FLOWS = modules("flows")
EXTRAS = modules(EXTRAS_PACKAGE)


def test_core_imports_point_downwards() -> None:
    known = {name for rooms in LAYERS for name in rooms}
    allowed_beside = {("ppo", "training")}
    wrong = {}
    for module in set(CORE) - {"rlhf_core"}:  # the front names what lies behind it
        room = module.split(".")[1] if "." in module else "errors"
        used = {r for r in rooms_used(CORE[module]) if r in known and r != room}
        above = {r for r in used if layer(r) < layer(room)}
        beside = {r for r in used if layer(r) == layer(room) and layer(room) in (4, 5, 6)}
        wrong[module] = above | {r for r in beside if (room, r) not in allowed_beside}
    assert not {module: rooms for module, rooms in wrong.items() if rooms}, (
        "these import upwards or sideways"
    )


def test_core_knows_no_orchestrator_and_mlflow_only_in_tracking() -> None:
    roots = {
        module: {name.split(".")[0] for name in imports(path)} for module, path in CORE.items()
    }
    assert not {
        module: used & ORCHESTRATORS for module, used in roots.items() if used & ORCHESTRATORS
    }
    assert not [
        m
        for m, used in roots.items()
        if "mlflow" in used and not m.startswith("rlhf_core.tracking.")
    ]


def test_core_and_flows_know_no_extra() -> None:
    """They find extras as they find the plugins of others: by entry points. So all runs where there
    are none.
    """
    house = CORE | FLOWS
    assert not [
        module
        for module in house
        if any(name.startswith(EXTRAS_PACKAGE) for name in imports(house[module]))
    ]


def test_every_package_of_flows_has_a_layer() -> None:
    rooms = {module.split(".")[1] for module in FLOWS if "." in module}
    assert rooms == set().union(*FLOWS_LAYERS)
    assert len(rooms) <= 12


@pytest.mark.slow
def test_flows_imports_point_downwards() -> None:
    wrong = {}
    for module in (module for module in FLOWS if "." in module):
        room = module.split(".")[1]
        used = rooms_used(FLOWS[module], "flows") - {room}
        wrong[module] = {
            other for other in used if layer(other, FLOWS_LAYERS) <= layer(room, FLOWS_LAYERS)
        }
    assert not {module: rooms for module, rooms in wrong.items() if rooms}, (
        "these import upwards or sideways"
    )


def test_flows_use_only_the_public_places_of_the_core() -> None:
    wrong = {}
    for module, path in FLOWS.items():
        may_use = FLOWS_MAY_USE | FLOWS_MAY_ALSO_USE.get(module, set())
        used = {
            name.removeprefix("rlhf_core.")
            for name in imports(path)
            if name.startswith("rlhf_core.")
        }
        foreign = {
            name
            for name in used
            if not any(name == place or name.startswith(f"{place}.") for place in may_use)
        }
        # A module counts where something is imported from it; what is imported counts by its own
        # name.
        wrong[module] = {
            name for name in foreign if not any(place.startswith(f"{name}.") for place in may_use)
        }
    assert not {module: names for module, names in wrong.items() if names}


def test_only_the_command_line_of_flows_uses_that_of_the_core() -> None:
    assert [module for module, path in FLOWS.items() if "cli" in rooms_used(path)] == ["flows.cli"]


def test_flows_start_no_process_from_source_text() -> None:
    """Children are modules with a name (``python -m``); only dvc.yaml's own commands go through a
    shell.
    """
    wrong = []
    for path in FLOWS.values():
        commands = [
            node.elts for node in ast.walk(tree(path)) if isinstance(node, ast.List | ast.Tuple)
        ]
        words = [[getattr(element, "value", None) for element in elements] for elements in commands]
        wrong += [(path, line) for line in words if "-c" in line and line[0] != "/bin/sh"]
    assert not wrong


def test_gold_is_for_annotators_and_judges_only() -> None:
    users = {
        module
        for module, path in CORE.items()
        if any(
            name == "rlhf_core.world.gold" or name.startswith("rlhf_core.world.gold.")
            for name in imports(path)
        )
    }
    assert {m for m in users if not m.startswith("rlhf_core.world.")} <= {
        "rlhf_core.evaluation.judges.gold"
    }


def closure(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in CORE and module not in seen:
            seen.add(module)
            waiting.extend(imports(CORE[module]))
    return seen


@pytest.mark.parametrize("stage", ["base", "sft", "reward", "referee", "judge", "critic", "ppo"])
def test_training_never_reaches_gold(stage: str) -> None:
    module, _ = stage_definition(stage)
    assert "rlhf_core.world.gold" not in closure(module)


def test_there_are_no_import_cycles() -> None:
    visiting: list[str] = []
    done: set[str] = set()
    house = CORE | FLOWS | EXTRAS

    def visit(module: str) -> None:
        if module in done or module not in house:
            return
        assert module not in visiting, " -> ".join([*visiting, module])
        visiting.append(module)
        for name in sorted(imports(house[module])):
            if name != module and name in house and house[name].name != "__init__.py":
                visit(name)
        visiting.pop()
        done.add(module)

    for module in house:
        visit(module)


def opened_without_care(path: Path) -> list[str]:
    """What a module makes locks or temporary files with."""
    found = []
    for node in ast.walk(tree(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [
            name for name in names if name.partition(".")[0] in {"tempfile", "fcntl", "filelock"}
        ]
        if isinstance(node, ast.Attribute) and node.attr in {"O_CREAT", "lockf", "flock", "mktemp"}:
            found.append(node.attr)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("/tmp")
        ):
            found.append(node.value)
    return found


@pytest.mark.parametrize("package", ["rlhf_core", "flows", "rlhf_extras"])
def test_locks_and_temporary_files_are_opened_in_one_module(package: str) -> None:
    """Elsewhere nobody thinks of links that another user of the host has put into the place of a
    file.
    """
    careless = {name: opened_without_care(path) for name, path in modules(package).items()}
    assert {name for name, found in careless.items() if found} <= {"rlhf_core.storage.files"}, (
        careless
    )


# What architectures call otherwise or lack, by the names of configurations and classes.
OF_ARCHITECTURES = {
    "max_position_embeddings", "max_seq_len", "num_key_value_heads", "head_dim",
    "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "cache_params",
    "GradientCheckpointingLayer",
}  # fmt: skip


def architectural_facts(path: Path) -> list[str]:
    """What a module reads itself of how an architecture is built."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
            found += [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
    return [name for name in found if name in OF_ARCHITECTURES]


@pytest.mark.parametrize("package", ["rlhf_core", "flows", "rlhf_extras"])
def test_how_architectures_are_built_is_read_in_one_module(package: str) -> None:
    facts = {name: architectural_facts(path) for name, path in modules(package).items()}
    readers = {name for name, found in facts.items() if found}
    assert readers <= {"rlhf_core.models.architecture"}, facts


# Where tables of our own words are made, whose lines `print_text` prints; and where other things are
# printed than texts: a version, an empty line, JSON for a process that reads it.
MAKE_TABLES = {
    "rlhf_extras.data_files.report_lines",
    "rlhf_extras.benchmarks.lm_evaluation_harness",
    "rlhf_extras.memory.command",
}
PRINT = {"flows.commands.text", "flows.cli", "flows.commands.run_state", "flows.dvc_repo.graph"}


def printed_directly(path: Path) -> list[str]:
    """Calls by which a module prints past `print_text` and `PlainConsole`."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in {"echo", "secho"}:
            found.append(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"Console", "print"}:
            found.append(getattr(node.func, "id", ""))
        if isinstance(node, ast.ImportFrom) and node.module == "rich":
            found += [alias.name for alias in node.names if alias.name == "print"]
    return found


@pytest.mark.parametrize("package", ["flows", "rlhf_extras"])
def test_what_is_printed_passes_one_place(package: str) -> None:
    """Elsewhere nobody thinks of markup and control characters in texts that others wrote."""
    direct = {name: printed_directly(path) for name, path in modules(package).items()}
    assert {name for name, found in direct.items() if found} <= PRINT | MAKE_TABLES, direct
