"""An entry of Triton's form: `config.pbtxt` beside its versions, or a `TritonPythonModel` without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from carpool.text_files import read_text
from carpool_worker.devices import devices
from carpool_worker.model_file import DEFAULT_FILE, PARAMETER_BYTES_MAX, DeclaredModel
from carpool_worker.model_process.configuration import TRITON
from carpool_worker.model_process.loader import objects_of
from carpool_worker.repository.layout import CONFIG_FILE, TRITON_CLASS, check_inside
from carpool_worker.triton.config import Config, empty_config, read_config
from carpool_worker.triton.instances import chosen_versions, devices_of
from carpool_worker.triton.refused import refused
from carpool_worker.triton.translation import FILES, Backend, ConfigError, backend_of, translate


def is_of_triton(entry: Path, version: Path) -> bool:
    """Whether a version is to be read in Triton's form."""
    if (entry / CONFIG_FILE).is_file():
        return True
    has_own = (entry / DEFAULT_FILE).is_file()
    return not has_own and TRITON_CLASS in objects_of(version / FILES[Backend.PYTHON])


def config_of(entry: Path) -> Config:
    """The configuration of an entry; that of one without a file if there is none. Raises ValueError."""
    file = entry / CONFIG_FILE
    if not file.is_file():
        return empty_config()
    check_inside(file, entry, f"{file}")
    try:
        if file.stat().st_size > PARAMETER_BYTES_MAX:
            raise ValueError(f"{file} has more than {PARAMETER_BYTES_MAX} bytes")
        text = read_text(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    return read_config(text, str(file))


def available_versions(entry: Path, versions: Sequence[str]) -> list[str]:
    """Of these versions, in ascending order, those that the configuration makes available. Raises ValueError,
    also if it names one that there is not."""
    problems: list[str] = []
    chosen = chosen_versions(config_of(entry), versions, problems)
    if problems:
        raise _error(entry, problems)
    return chosen


def declared_by_config(entry: Path, version: Path) -> DeclaredModel:
    """A version of an entry. Raises ConfigError with all that is wrong, and ValueError."""
    config, problems = config_of(entry), list[str]()
    if config["name"] and config["name"] != entry.name:
        problems.append(f"name: {config['name']!r} must be that of the folder, {entry.name!r}; remove it")
    candidates = [config["default_model_filename"], *FILES.values()]
    backend = backend_of(config, [file for file in candidates if (version / file).is_file()], problems)
    processes = devices_of(config, lambda: devices("auto", "auto"), problems)
    if backend is None:
        raise _error(entry, [*problems, *refused(config)])
    file = version / (config["default_model_filename"] or FILES[backend])
    problems += [*_problems_of(config, backend), *_missing_files(config, entry, file)]
    if problems:
        raise _error(entry, problems)
    completed = {**config, "name": entry.name, "backend": backend.value}
    return DeclaredModel(
        f"{TRITON}{file}",
        version,
        replicas=len(processes) if processes else "auto",
        device=",".join(processes) if processes else None,
        declared={
            "config": completed,
            "backend": backend.value,
            "name": entry.name,
            "version": version.name,
            "entry": str(entry),
        },
    )


def _problems_of(config: Config, backend: Backend) -> list[str]:
    try:
        translate(config, backend)
    except ConfigError as error:
        return error.problems
    return []


def _missing_files(config: Config, entry: Path, file: Path) -> Iterator[str]:
    """A sentence for each file that is not there, or leads out of the entry."""
    files = [("default_model_filename" if config["default_model_filename"] else "model file", file)]
    files += [
        (f"output {one['name']}: label_filename", entry / one["label_filename"])
        for one in config["output"]
        if one["label_filename"]
    ]
    files += [
        (
            f"sequence_batching.state {state['input_name']}: data_file",
            entry / "initial_state" / one["data_file"],
        )
        for state in config.get("sequence_batching", {}).get("state", ())
        for one in state["initial_state"]
        if "data_file" in one
    ]
    files += [
        (f"model_warmup {sample['name']}: input_data_file", entry / "warmup" / one["input_data_file"])
        for sample in config["model_warmup"]
        for one in sample["inputs"].values()
        if "input_data_file" in one
    ]
    for what, path in files:
        if not path.is_file():
            yield f"{what}: there is no file {path}"
            continue
        try:
            check_inside(path, entry, str(path))
        except ValueError as error:
            yield f"{what}: {error}"


def _error(entry: Path, problems: Sequence[str]) -> ConfigError:
    return ConfigError([f"{entry / CONFIG_FILE}: {problem}" for problem in problems])
