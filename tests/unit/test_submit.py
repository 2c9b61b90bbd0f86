"""What `rlhf submit` sends, and what it refuses to send, before anything reaches a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlhf_cluster.submit import EXCLUDES, check_address, check_size, excluded, package_files, train_command

CONFIG = """
run: {name: tiny, steps: 1, dir: /shared/runs}
model: {policy: %s, reward: /shared/reward}
data: {prompts: prompts.jsonl}
queue: {groups_per_batch: 1}
reward: {components: [{name: model, kind: model}]}
"""


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def config_in(folder: Path, policy: str = "/shared/policy") -> Path:
    return write(folder / "configs" / "run.yaml", CONFIG % policy)


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "http://localhost:8265", "http://[::1]:8265"])
def test_an_address_on_this_machine_needs_no_token(address: str) -> None:
    assert check_address(address, auth_mode="") is None


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_an_address_on_the_network_without_a_token_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="RAY_AUTH_MODE=token"):
        check_address("http://10.0.0.5:8265", auth_mode=mode)


def test_an_address_on_the_network_with_a_token_is_accepted() -> None:
    assert check_address("https://ray.example.org:8265", auth_mode="token") is None


@pytest.mark.parametrize("address", ["auto", "10.0.0.5:6379", "ray://10.0.0.5:10001", "http://", "http://h:port"])
def test_an_address_that_is_no_job_server_url_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:8265"):
        check_address(address, auth_mode="token")


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".venv/bin/python", "runs/a/metrics.jsonl", "x/checkpoints/1/w.bin", "models/m/a.safetensors"),
        *(".env", "deploy/.env.production", "tls/server.key", "server.pem", ".ssh/config", "home/auth_token"),
    ],
)
def test_history_output_weights_and_secrets_stay_here(path: str) -> None:
    assert excluded(path)


@pytest.mark.parametrize("path", ["learner/models.py", "rlhf_cluster/run_state.py", "configs/tiny.yaml", "key.py"])
def test_code_and_configs_are_sent(path: str) -> None:
    assert not excluded(path)


@pytest.mark.parametrize("with_git", [True, False])
def test_the_package_is_the_tree_without_what_is_excluded_biggest_file_first(tmp_path: Path, with_git: bool) -> None:
    write(tmp_path / "rlhf_cluster" / "cli.py", "ab")
    write(tmp_path / "configs" / "run.yaml", "abcd")
    for name in ("models/m/w.safetensors", "runs/a/metrics.jsonl", ".env", "server.pem"):
        write(tmp_path / name)
    if with_git:
        write(tmp_path / ".gitignore", "scratch\n")
        write(tmp_path / "scratch" / "big.bin", "x" * 100)
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    expected = [("configs/run.yaml", 4), ("rlhf_cluster/cli.py", 2)]
    assert package_files(tmp_path) == ([(".gitignore", 8), *expected] if with_git else expected)


def test_a_package_over_the_limit_is_refused_naming_its_biggest_files() -> None:
    files = [("data/corpus.jsonl", 90 * 2**20), ("notes.txt", 20 * 2**20)]
    with pytest.raises(ValueError, match=r"110\.0 MiB to send, Ray takes 100 MiB; biggest: data/corpus\.jsonl \(90"):
        check_size(files)
    check_size([("data/corpus.jsonl", 100 * 2**20)])


def test_the_job_trains_the_config_and_joins_the_cluster_it_runs_on(tmp_path: Path) -> None:
    command = train_command(config_in(tmp_path), ["run.steps=3"], tmp_path)
    train = ["python", "-m", "rlhf_cluster", "train", "configs/run.yaml"]
    assert command == [*train, "run.steps=3", "cluster.address=auto"]


def test_the_job_gets_the_presets_before_the_overrides_which_win(tmp_path: Path) -> None:
    presets = ["ppo_max", "ablation_kl_0_1"]
    command = train_command(config_in(tmp_path), ["algorithm.kl.coef=0.3"], tmp_path, presets=presets)
    options = ["--preset", "ppo_max", "--preset", "ablation_kl_0_1"]
    assert command[4:] == ["configs/run.yaml", *options, "algorithm.kl.coef=0.3", "cluster.address=auto"]


def test_a_preset_given_by_path_goes_by_its_path_in_the_folder_that_is_sent(tmp_path: Path) -> None:
    write(tmp_path / "mine" / "parent.yaml", "parent: ppo_max\nrun: {steps: 2}")
    preset = write(tmp_path / "mine" / "child.yaml", "parent: parent.yaml\nrun: {steps: 3}")
    command = train_command(config_in(tmp_path), [], tmp_path, presets=[str(preset)])
    assert command[5:7] == ["--preset", "mine/child.yaml"]


@pytest.mark.parametrize("outside", ["preset", "parent"])
def test_a_preset_outside_the_folder_that_is_sent_is_refused(tmp_path: Path, outside: str) -> None:
    project = tmp_path / "project"
    away = write(tmp_path / "elsewhere" / "away.yaml", "run: {steps: 2}")
    child = write(project / "child.yaml", "parent: ../elsewhere/away.yaml")
    with pytest.raises(ValueError, match=r"preset: \S*away\.yaml lies outside"):
        train_command(config_in(project), [], project, presets=[str(away if outside == "preset" else child)])


def test_a_model_that_a_preset_names_is_checked_like_any_other(tmp_path: Path) -> None:
    preset = write(tmp_path / "tiny.yaml", "model: {critic: models/critic}")
    with pytest.raises(ValueError, match=r"model\.critic: models/critic is not sent"):
        train_command(config_in(tmp_path), [], tmp_path, presets=[str(preset)])


def test_a_cluster_address_the_user_chose_is_kept(tmp_path: Path) -> None:
    command = train_command(config_in(tmp_path), ["cluster.address=10.0.0.5:6379"], tmp_path)
    assert command[-1] == "cluster.address=10.0.0.5:6379"


def test_a_config_outside_the_folder_that_is_sent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lies outside"):
        train_command(config_in(tmp_path / "elsewhere"), [], tmp_path / "project")


def test_a_model_folder_that_is_not_sent_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.policy: models/tiny is not sent.*model\.policy=/shared/models/tiny"):
        train_command(config_in(tmp_path, policy="models/tiny"), [], tmp_path)


def test_a_run_folder_that_would_be_lost_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    train_command(config_in(tmp_path), ["run.dir=runs"], tmp_path, said.append)
    assert len(said) == 1 and "run.dir 'runs' is relative" in said[0]


def test_patterns_mean_the_same_to_ray_as_here() -> None:
    """Ray reads them as gitignore lines; without slashes and negations those match single names at any depth."""
    assert not [pattern for pattern in EXCLUDES if "/" in pattern or pattern.startswith(("!", "#"))]
