"""The recipes of examples/cluster: what a shell, a parser and the fields of the schema tell of them."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipec

EXAMPLES = Path(__file__).parent.parent / "examples"

SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"1",  # torchrun starts the others
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "signal": r"(B:)?[A-Z]+@\d+",
    "requeue": r"",
    "open-mode": r"append|truncate",
    "output": r"\S+",
}
"""Options of sbatch that the script has, and what each of them takes."""

JOB: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "elasticPolicy": {"rdzvBackend": str, "minReplicas": int, "maxReplicas": int, "maxRestarts": int},
        "runPolicy": {"cleanPodPolicy": str},
        "pytorchReplicaSpecs": {"Worker": {"replicas": int, "restartPolicy": str, "template": dict}},
    },
}
"""Fields of the legacy recipe, as in the CustomResourceDefinition pytorchjobs.kubeflow.org, version v1."""

RUNTIME: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": {"trainer.kubeflow.org/framework": str}},
    "spec": {
        "mlPolicy": {"numNodes": int, "torch": dict},
        "template": {"spec": {"failurePolicy": {"maxRestarts": int}, "replicatedJobs": list}},
    },
}
TRAIN_JOB: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {"numNodes": int, "resourcesPerNode": {"limits": dict}, "command": list},
    },
}
"""Fields of the recipe, as in trainer.kubeflow.org, version v1alpha1, of Kubeflow Trainer 2.3."""


def test_the_slurm_script_is_a_shell_script_whose_options_sbatch_knows() -> None:
    script = EXAMPLES / "cluster" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    found = dict(re.fullmatch(r"--([\w-]+)=?(.*)", option).groups() for option in options)  # type: ignore[union-attr]
    assert len(found) == len(options)
    for name, value in found.items():
        assert re.fullmatch(SBATCH[name], value), (name, value)
    commands = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(line.startswith("#SBATCH") is False for line in lines[commands:])  # sbatch reads none there


def test_the_kubernetes_job_has_the_fields_that_the_operator_knows() -> None:
    job = yaml.safe_load((EXAMPLES / "cluster" / "kubernetes.yaml").read_text(encoding="utf-8"))
    require_fields(job, JOB, "job")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker, policy = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this one
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def test_the_train_job_names_a_runtime_with_the_fields_that_the_trainer_knows() -> None:
    text = (EXAMPLES / "cluster" / "trainjob.yaml").read_text(encoding="utf-8")
    runtime, job = yaml.safe_load_all(text)
    require_fields(runtime, RUNTIME, "runtime")
    require_fields(job, TRAIN_JOB, "job")
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    referred = job["spec"]["runtimeRef"]
    assert referred["apiGroup"] == runtime["apiVersion"].partition("/")[0]
    assert (referred["kind"], referred["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # the trainer looks for it
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"  # for these, too
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    saving = {each["name"]: int(each["value"]) for each in container["env"]}
    assert 0 < saving["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] < pod["terminationGracePeriodSeconds"]


@pytest.mark.slow
def test_ray_train_runs_the_training_on_workers_without_gpus(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason='needs `pip install "ray[train]"`')
    script = EXAMPLES / "cluster" / "ray_train.py"
    given = ["--workers", "2", "--steps", "6", "--every", "2", "--directory", str(tmp_path)]
    done = subprocess.run([sys.executable, script, *given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step +6  loss \d", done.stdout + done.stderr)
    assert (tmp_path / "step-00000006").is_dir()


def require_fields(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, kind in expected.items():
            require_fields(found[key], kind, f"{where}.{key}")
    else:
        assert isinstance(found, expected), where


@pytest.mark.slow
def test_the_recipes_start_a_script_that_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = EXAMPLES / "restartable_digits.py"
    for recipe in ("slurm.sh", "kubernetes.yaml", "trainjob.yaml"):
        assert f"examples/{script.name}" in (EXAMPLES / "cluster" / recipe).read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(str(EXAMPLES))

    printed: list[str] = []

    def train(directory: str) -> None:
        given = ["--steps", "6", "--every", "2", "--directory", str(tmp_path / directory)]
        monkeypatch.setattr(sys, "argv", [str(script), *given])
        runpy.run_path(str(script), run_name="__main__")

    def log_until_step_4(line: str) -> None:
        printed.append(line)
        if line.startswith("step    4"):
            raise KeyboardInterrupt

    monkeypatch.setattr(pipec, "log", printed.append)
    train("whole")
    *whole, accuracy = printed
    assert [line[:9] for line in whole] == ["step    2", "step    4", "step    6"]
    printed.clear()
    monkeypatch.setattr(pipec, "log", log_until_step_4)
    with pytest.raises(KeyboardInterrupt):
        train("stopped")
    monkeypatch.setattr(pipec, "log", printed.append)
    train("stopped")
    assert printed == [*whole, accuracy]
    printed.clear()
    train("stopped")
    complete, again = printed
    assert complete.startswith(
        f"the run in {tmp_path / 'stopped'} has made its 6 steps: pass another --directory"
    )
    assert again == accuracy
