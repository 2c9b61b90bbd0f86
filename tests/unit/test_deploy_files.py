"""The files in deploy/ agree with the project (versions, ports, paths, sizes) and open Ray to no network."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlhf_cluster.config import PrometheusConfig
from rlhf_cluster.config_io import load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
METRICS_PORT = PrometheusConfig().port


def pinned(package: str) -> str:
    """Exact version that pyproject.toml asks for."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    (version,) = [line.split("==")[1] for line in lines if re.split(r"[\[=]", line)[0] == package]
    return version


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    return next(yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text()))


@pytest.fixture(scope="module")
def policy() -> dict[str, Any]:
    return list(yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text()))[1]


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def pods(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    spec = rayjob["spec"]["rayClusterSpec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def train_arguments(rayjob: dict[str, Any]) -> tuple[Path, list[str]]:
    """Config path and overrides of the job's command line, with the pod's address filled in."""
    words = shlex.split(rayjob["spec"]["entrypoint"].replace("$POD_IP", "192.0.2.20"))
    assert words[:4] == ["python", "-m", "rlhf_cluster", "train"]
    return ROOT / words[4], words[5:]


def test_the_image_holds_the_engine_and_project_versions_of_pyproject(dockerfile: str, rayjob: dict[str, Any]) -> None:
    assert f"ARG VLLM_VERSION={pinned('vllm')}\nFROM vllm/vllm-openai:v${{VLLM_VERSION}}\n" in dockerfile
    assert '".[gpu]"' in dockerfile
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(rayjob)}
    assert images == {f"rlhf-cluster:{PROJECT['version']}"}
    assert f"-t rlhf-cluster:{PROJECT['version']}" in dockerfile


def test_the_image_runs_as_the_user_that_the_pods_name(dockerfile: str, rayjob: dict[str, Any]) -> None:
    (uid,) = re.findall(r"useradd .*--uid (\d+) rlhf", dockerfile)
    assert re.findall(r"^USER (\w+)", dockerfile, re.M) == ["rlhf"]
    for pod in pods(rayjob):
        assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "runAsUser": int(uid), "fsGroup": int(uid)}
        confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert pod["spec"]["containers"][0]["securityContext"] == confined


def test_the_image_takes_only_folders_that_exist_and_leaves_keys_out(dockerfile: str) -> None:
    copied = {word for line in re.findall(r"^COPY (.*)$", dockerfile, re.M) for word in line.split()[:-1]}
    assert {"rlhf_cluster", "actors", "learner", "configs", "pyproject.toml"} <= copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert {"*", "**/.env*", "**/*.key", "**/*.pem"} <= set(ignored)


@pytest.mark.parametrize("name", ["Dockerfile", "rayjob.yaml", "ray-cluster.yaml", "prometheus.yml"])
def test_no_file_opens_a_server_to_every_network_or_holds_a_secret(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert "0.0.0.0" not in text and "hostNetwork" not in text
    assert not re.search(r"(token|password|secret|api_key)\s*[:=]\s*['\"]?[A-Za-z0-9+/]{16,}", text, re.I)


def test_the_ray_versions_agree(rayjob: dict[str, Any]) -> None:
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == pinned("ray")


def test_the_rayjob_trains_a_config_that_loads_with_its_overrides(rayjob: dict[str, Any]) -> None:
    path, overrides = train_arguments(rayjob)
    config = load_config(path, overrides)
    assert config.cluster.address == "auto", "the driver must join the cluster that KubeRay started"
    assert config.metrics.prometheus is not None
    assert (config.metrics.prometheus.host, config.metrics.prometheus.port) == ("192.0.2.20", METRICS_PORT)
    assert Path(config.run.dir).is_relative_to("/shared")
    assert config.model.attention == "sdpa", "flash-attn is not in the image"


def test_the_gpu_pods_hold_exactly_the_gpus_that_the_config_takes(rayjob: dict[str, Any]) -> None:
    config = load_config(*train_arguments(rayjob))
    engines = config.rollout.workers * config.rollout.engine.tensor_parallel
    needed = engines + config.scorers.reward_replicas + config.scorers.reference_replicas + config.learner.ranks
    (group,) = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["replicas"] * limits["nvidia.com/gpu"] == needed
    assert rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


def test_model_and_data_folders_lie_on_the_volume_that_every_pod_mounts(rayjob: dict[str, Any]) -> None:
    config = load_config(*train_arguments(rayjob))
    paths = [config.model.policy, config.model.reward, config.data.prompts, config.data.eval_prompts]
    assert all(path is not None and path.startswith("/shared/") for path in paths)
    for pod in pods(rayjob):
        mounts = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert {"/shared", "/dev/shm"} <= mounts


def test_the_rayjob_requires_the_token_and_keeps_the_dashboard_inside(
    rayjob: dict[str, Any], policy: dict[str, Any]
) -> None:
    spec = rayjob["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert policy["kind"] == "NetworkPolicy"
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert all(selected.items() <= pod["metadata"]["labels"].items() for pod in pods(rayjob))
    allowed = {
        rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]: {
            port["port"] for port in rule.get("ports", [])
        }
        for rule in policy["spec"]["ingress"]
    }
    assert allowed == {"rlhf-cluster": set(), "kuberay-operator": {8265}, "prometheus": {8080, METRICS_PORT}}


def test_prometheus_finds_the_driver_on_kubernetes(rayjob: dict[str, Any]) -> None:
    head = pods(rayjob)[0]
    annotations = head["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == str(METRICS_PORT)
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports["rlhf-metrics"] == METRICS_PORT


def test_prometheus_scrapes_the_default_exporter_and_rays_own_list() -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]}
    default = PrometheusConfig()
    assert jobs["rlhf"]["static_configs"] == [{"targets": [f"{default.host}:{default.port}"]}]
    (files,) = (config["files"] for config in jobs["ray"]["file_sd_configs"])
    assert [Path(name).name for name in files] == ["prom_metrics_service_discovery.json"]


def test_the_cluster_file_meets_rays_own_schema(cluster: dict[str, Any]) -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.submodule_search_locations is not None
    schema = Path(ray.submodule_search_locations[0]) / "autoscaler" / "ray-schema.json"
    jsonschema.validate(cluster, json.loads(schema.read_text()))
    assert cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_the_cluster_starts_with_the_token_and_a_loopback_job_server(cluster: dict[str, Any]) -> None:
    head, worker = cluster["head_start_ray_commands"][-1], cluster["worker_start_ray_commands"][-1]
    assert "RAY_AUTH_MODE=token" in head and "RAY_AUTH_MODE=token" in worker
    assert "--dashboard-host=127.0.0.1" in head
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    assert any(command == "chmod 600 ~/.ray/auth_token" for command in cluster["setup_commands"])
    assert any("[gpu]" in command for command in cluster["setup_commands"])


def test_the_cluster_file_copies_no_history_weights_or_keys_to_the_nodes(cluster: dict[str, Any]) -> None:
    assert {".git", ".venv", "runs", "models", "checkpoints", ".env", "*.key", "*.pem"} <= set(cluster["rsync_exclude"])
