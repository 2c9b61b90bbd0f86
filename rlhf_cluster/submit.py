"""Sends a training run to a Ray cluster as a job: `rlhf submit`, through the `ray job submit` command line.

What leaves this machine is one folder without history, environments, run output, model weights and key files, and a
command line. No environment variable is passed on; Ray itself authenticates with the token of ``RAY_AUTH_MODE=token``.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError, load_config
from rlhf_cluster.presets import is_path, load_preset

MIB = 2**20

# The server behind the job API takes uploads up to this size (ray 2.60, DASHBOARD_CLIENT_MAX_SIZE).
MAX_PACKAGE_BYTES = 100 * MIB

# Names of files and folders that stay here, at any depth.
EXCLUDES: tuple[str, ...] = (
    *(".git", ".venv", "venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build"),
    *("runs", "checkpoints", "models"),
    *(".env", ".env.*", "*.key", "*.pem", "*.p12", "id_rsa*", "id_ed25519*", "auth_token", ".netrc", ".ssh", ".aws"),
)


def submit_job(
    config: Path,
    overrides: Sequence[str] = (),
    presets: Sequence[str] = (),
    *,
    address: str,
    working_dir: Path = Path(),
    follow: bool = True,
    say: Callable[[str], None] = print,
) -> str:
    """Submit `python -m rlhf_cluster train CONFIG --preset ... OVERRIDES...` to the Ray job server at ``address``.

    ``working_dir`` (the current folder by default) is sent and becomes the job's current folder.

    With ``follow`` the job's log is streamed until the job ends, and an interrupt stops the streaming, not the job;
    without it the call returns as soon as the job is accepted. Returns the job's submission id.

    Raises:
        ConfigError: the address is no URL or is open to the network without a token; the config is invalid; it
            or a preset lies outside ``working_dir``; it names a model folder that is not sent; the package is over
            Ray's limit.
        RuntimeError: the job was not accepted, or (``follow``) did not succeed.
    """
    check_address(address, os.environ.get("RAY_AUTH_MODE", ""))
    entrypoint = train_command(config, overrides, working_dir, say, presets)
    files = package_files(working_dir)
    check_size(files)
    size = sum(size for _, size in files)
    submission_id = f"rlhf-{config.stem}-{uuid.uuid4().hex[:8]}"
    say(f"job {submission_id}: {len(files)} files, {size / MIB:.1f} MiB from {working_dir.resolve()}, to {address}")
    say(f"stop it with: ray job stop --address {address} {submission_id}")
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit"),
        *("--address", address, "--submission-id", submission_id, "--working-dir", str(working_dir)),
        *("--runtime-env-json", json.dumps({"excludes": list(EXCLUDES)})),
        *(() if follow else ("--no-wait",)),
        *("--", *entrypoint),
    ]
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        say(f"no longer following {submission_id}; it keeps running")
        raise
    if code:
        what = "did not succeed" if follow else "was not accepted"
        raise RuntimeError(f"job {submission_id} at {address} {what} (`ray job submit` ended with {code}); see above")
    return submission_id


def check_address(address: str, auth_mode: str) -> None:
    """Refuse an ``address`` that is no http(s) URL, or not on this machine while Ray's token is off.

    Whoever reaches a job server without a token runs code on the whole cluster.
    """
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"address: {error} in {address!r}; write http://HOST:8265") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"address: must be the URL of a Ray job server, got {address!r}; write http://HOST:8265")
    if not _is_loopback(host) and auth_mode.lower() != "token":
        raise ConfigError(
            f"address: {host} is not this machine and RAY_AUTH_MODE is {auth_mode or 'not set'!r}; "
            "set RAY_AUTH_MODE=token here and on every node (deploy/README.md)"
        )


def train_command(
    config: Path,
    overrides: Sequence[str],
    working_dir: Path,
    say: Callable[[str], None] = print,
    presets: Sequence[str] = (),
) -> list[str]:
    """Command line of the job, with the paths of config and presets relative to ``working_dir``.

    A shipped preset goes by its name: the job finds it in the package it runs, which is the one that is sent.
    """
    relative = _path_in_job("config", config, working_dir)
    loaded = load_config(config, overrides, presets)
    _refuse_models_left_behind(loaded)
    if not PurePath(loaded.run.dir).is_absolute():
        say(
            f"run.dir {loaded.run.dir!r} is relative: the run folder will lie in the job's own folder on the head "
            "node, which Ray deletes; set run.dir to a folder on shared storage to keep it"
        )
    options = [option for name in presets for option in ("--preset", _preset_in_job(name, working_dir))]
    # Without an address the run would start a second Ray inside the job.
    join = [] if loaded.cluster.address else ["cluster.address=auto"]
    return ["python", "-m", "rlhf_cluster", "train", relative, *options, *overrides, *join]


def package_files(working_dir: Path) -> list[tuple[str, int]]:
    """(path relative to ``working_dir``, bytes) of every file that will be sent, biggest first.

    Like Ray's own packing it leaves out what .gitignore names. Without git the ignored files are counted too, so the
    sum is then an upper bound.
    """
    kept = (name for name in _candidates(working_dir) if not excluded(name))
    sized = [(name, (working_dir / name).stat().st_size) for name in kept if (working_dir / name).is_file()]
    return sorted(sized, key=lambda item: (-item[1], item[0]))


def check_size(files: Sequence[tuple[str, int]], limit: int = MAX_PACKAGE_BYTES) -> None:
    """Refuse a package over ``limit`` bytes before the upload, naming the five biggest files."""
    total = sum(size for _, size in files)
    if total > limit:
        biggest = ", ".join(f"{name} ({size / MIB:.1f} MiB)" for name, size in list(files)[:5])
        raise ConfigError(
            f"working_dir: {total / MIB:.1f} MiB to send, Ray takes {limit / MIB:.0f} MiB; biggest: {biggest}. "
            "Put data and weights on storage that every node sees, or name them in .gitignore"
        )


def excluded(relative_path: str) -> bool:
    """Whether a file stays here because it, or a folder it lies in, has a name of ``EXCLUDES``."""
    return any(fnmatch(part, pattern) for part in PurePath(relative_path).parts for pattern in EXCLUDES)


def _candidates(working_dir: Path) -> Iterator[str]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listing, cwd=working_dir, capture_output=True, check=True, timeout=60).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git here, or no repository
        for folder, subfolders, names in os.walk(working_dir):
            subfolders[:] = [name for name in subfolders if not excluded(name)]
            for name in names:
                yield (Path(folder) / name).relative_to(working_dir).as_posix()
    else:
        yield from (os.fsdecode(name) for name in found.split(b"\0") if name)


def _path_in_job(what: str, path: Path, working_dir: Path) -> str:
    root = working_dir.resolve()
    if not path.resolve().is_relative_to(root):
        raise ConfigError(f"{what}: {path} lies outside the folder that is sent, {working_dir}; move it there")
    return path.resolve().relative_to(root).as_posix()


def _preset_in_job(name: str, working_dir: Path) -> str:
    if not is_path(name):
        return name
    files = load_preset(name).files
    for file, child in zip(files, (*files[1:], None), strict=True):
        # A parent that goes by its name is shipped; one that goes by its path has to be sent.
        if child is None or (child.parent is not None and is_path(child.parent)):
            _path_in_job("preset", file.path, working_dir)
    return _path_in_job("preset", Path(name), working_dir)


def _refuse_models_left_behind(config: Config) -> None:
    for field in ("policy", "reference", "reward", "critic"):
        folder = getattr(config.model, field)
        if folder is not None and not PurePath(folder).is_absolute() and excluded(folder):
            raise ConfigError(
                f"model.{field}: {folder} is not sent with the job; give the absolute path of a folder that every "
                f"node sees, e.g. model.{field}=/shared/{folder}"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
