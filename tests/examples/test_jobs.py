"""Job files for clusters: they have the form that is published for them, and the commands in them could be typed.

None is started. Azure's schema comes with a package too large for the tests: the file was loaded with azure-ai-ml 1.35.
"""

import argparse
import json
import re
import runpy
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from tests.docs.pages import REPOSITORY
from tests.docs.test_command_lines import check, check_words
from thinwire.engine import load_config

EXAMPLES = REPOSITORY / "examples"
# kubeflow.org/v2beta1, as the operator's CRD has them.
MPI_JOB_FIELDS = set(
    ["launcherCreationPolicy", "mpiImplementation", "mpiReplicaSpecs", "runLauncherAsWorker", "runPolicy"]
)
MPI_JOB_FIELDS |= {"slotsPerWorker", "sshAuthMountPath"}
RUN_POLICY_FIELDS = set(
    ["activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend"]
)
RUN_POLICY_FIELDS |= {"ttlSecondsAfterFinished"}


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def container(replicas: Any) -> Any:
    (one,) = replicas["template"]["spec"]["containers"]
    return one


def check_example(name: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the example itself parse these arguments, and stop there."""

    def parse(parser: argparse.ArgumentParser) -> None:
        _, unknown = parser.parse_known_args(list(arguments))
        assert not unknown, f"{name} takes no {unknown}"
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not stopped.value.code


def check_batch(ranks: int) -> None:
    """The engine's example divides its batch among so many ranks."""
    load_config(json.loads((EXAMPLES / "engine.json").read_text()), world_size=ranks)


def test_train_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load("kubeflow_trainjob.yaml")
    trainer = job["spec"]["trainer"]
    check_words([*trainer["command"], *trainer["args"]])
    check_example("engine.py", trainer["args"], monkeypatch)
    check_batch(trainer["numNodes"] * trainer["numProcPerNode"])
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert mount["name"] in {volume["name"] for volume in pod["volumes"]}
    assert mount["mountPath"] in trainer["args"]


def test_published_forms() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = load("kubeflow_trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # an unknown field would be left out
    for replica in load("kubeflow_mpijob.yaml")["spec"]["mpiReplicaSpecs"].values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        template = replica["template"]
        assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template


def test_mpi_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load("kubeflow_mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["spec"].keys() <= MPI_JOB_FIELDS
    assert job["spec"]["runPolicy"].keys() <= RUN_POLICY_FIELDS
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert replicas.keys() == {"Launcher", "Worker"}
    launcher = container(replicas["Launcher"])
    check_words(launcher["command"])
    check_example("plain_loop.py", launcher["args"], monkeypatch)
    _, hostfile, ranks = launcher["command"]
    assert hostfile == "/etc/mpi/hostfile"
    assert int(ranks) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert container(replicas["Worker"])["image"] == launcher["image"]


def test_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the meeting place by its service, and begin when as many are there as pods are started."""
    service, meeting, job = yaml.safe_load_all((EXAMPLES / "elastic_kubernetes.yaml").read_text())
    assert [one["kind"] for one in (service, meeting, job)] == ["Service", "Deployment", "Job"]
    labels = meeting["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == meeting["spec"]["selector"]["matchLabels"] == labels
    (port,) = service["spec"]["ports"]
    served = container(meeting["spec"])["command"]
    check_words(served)
    assert served[-1] == f"0.0.0.0:{port['port']}"
    worker, spec = container(job["spec"]), job["spec"]
    (place,) = worker["env"]
    assert place == {"name": "THINWIRE_MEETING", "value": f"{service['metadata']['name']}:{port['port']}"}
    check_words(worker["command"])
    check_example("elastic_steps.py", worker["args"], monkeypatch)
    assert worker["args"] == ["--workers", str(spec["parallelism"])]
    assert spec["completions"] == spec["parallelism"]


def test_azure_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load("azureml_job.yaml")
    assert job["type"] == "command"
    assert (EXAMPLES / job["code"]).resolve() == REPOSITORY
    build = job["environment"]["build"]
    assert (EXAMPLES / build["path"] / build["dockerfile_path"]).is_file()
    outputs = re.findall(r"\$\{\{outputs\.(\w+)\}\}", job["command"])
    assert outputs == list(job["outputs"])
    command = re.sub(r"\$\{\{.*?\}\}", "output", job["command"])
    check(command)
    check_example("engine.py", shlex.split(command)[2:], monkeypatch)
    assert job["distribution"]["type"] == "pytorch"
    check_batch(job["resources"]["instance_count"] * job["distribution"]["process_count_per_instance"])


def test_the_image_installs_what_there_is() -> None:
    (installed,) = re.findall(r"^RUN (pip .*)$", (EXAMPLES / "Dockerfile").read_text(), re.MULTILINE)
    check(installed)
