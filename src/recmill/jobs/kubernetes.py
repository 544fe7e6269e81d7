"""Kubernetes manifests of a job: an indexed Job with a Service, a JobSet, or a TrainJob. kubectl accepts JSON."""

from collections.abc import Sequence
from typing import Any

from recmill.errors import ConfigError
from recmill.jobs.place import Place
from recmill.launch.processes import TUNING

_CONFIG_DIRECTORY = "/etc/recmill"
_PORT = 29500  # every pod has an address of its own
_GRACE_SECONDS = 120  # from SIGTERM to SIGKILL: a checkpoint is saved meanwhile
_NO_RETRY = [2, 3, 4]  # exit codes of errors in config, data and checkpoints: another attempt would fail as well
_MAX_RETRIES = 20
Manifest = dict[str, Any]


def manifests(name: str, run: str, place: Place, arguments: Sequence[str], config_text: str) -> Manifest:
    """Return the config and the job as one List, which a single `kubectl create` creates."""
    paths = [mount.partition(":")[2] for mount in place.mounts]
    if not any(f"{run}/".startswith(f"{path.rstrip('/')}/") for path in paths):
        raise ConfigError(
            f"--run {run} is in none of the mounts ({', '.join(paths)}). Choose a --run that all pods mount."
        )
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, place),
        "data": {"config.toml": config_text},
    }
    train = ["-P", "-m", "recmill", "train", f"{_CONFIG_DIRECTORY}/config.toml", "--run-dir", run, *arguments]
    make = {"job": _job, "jobset": _job_set, "trainjob": _train_job}[place.kind]
    items = [config, *make(name, place, list(map(_exactly, train)))]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _job(name: str, place: Place, train: list[str]) -> list[Manifest]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, place),
        "spec": {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True},
    }
    spec = _job_spec(place, _pod(name, place, train, f"{name}-0.{name}")) | {"backoffLimit": _MAX_RETRIES}
    if place.seconds:
        spec["activeDeadlineSeconds"] = place.seconds
    return [
        service,
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(name, place, queue=True), "spec": spec},
    ]


def _job_set(name: str, place: Place, train: list[str]) -> list[Manifest]:
    pod = _pod(name, place, train, f"{name}-node-0-0.{name}")
    inner = _job_spec(place, pod) | {"backoffLimit": 0}
    del inner["podFailurePolicy"]  # any failure restarts all pods together
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": _MAX_RETRIES},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": inner}}],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [{**kind, "metadata": _metadata(name, place, queue=True), "spec": spec}]


def _train_job(name: str, place: Place, train: list[str]) -> list[Manifest]:
    """Return a TrainJob of Kubeflow Trainer, which starts torchrun on each node."""
    pod = _pod(name, place, train, "")
    (container,) = pod["containers"]
    trainer = {
        "image": place.image,
        "command": ["torchrun"],
        "args": ["--no-python", "python3", *map(_exactly, train)],  # torchrun reads $$ as $, too
        "env": _variables(TUNING | place.env),
        "numNodes": place.nodes,
        "numProcPerNode": place.procs,
        "resourcesPerNode": container["resources"],
    }
    volumes = {"volumes": pod["volumes"], "containers": [{"name": "node", "volumeMounts": container["volumeMounts"]}]}
    patch = {
        "manager": "recmill.io/launch",
        "trainingRuntimeSpec": {
            "template": {
                "spec": {
                    "replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": volumes}}}}],
                }
            }
        },
    }
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}
    kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return [{**kind, "metadata": _metadata(name, place, queue=True), "spec": spec}]


def _exactly(text: str) -> str:
    """Return what Kubernetes turns into `text`: in arguments and variables it reads $(NAME), and $$ as $."""
    return text.replace("$", "$$")


def _variables(values: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": _exactly(value)} for name, value in values.items()]


def _metadata(name: str, place: Place, queue: bool = False) -> Manifest:
    labels = {"app.kubernetes.io/name": "recmill"}
    if queue and place.queue:
        labels["kueue.x-k8s.io/queue-name"] = place.queue
    return {"name": name, "labels": labels, **({"namespace": place.namespace} if place.namespace else {})}


def _job_spec(place: Place, pod: Manifest) -> Manifest:
    rules: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},  # saved and stopped
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _NO_RETRY}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": place.nodes,
        "parallelism": place.nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }


def _pod(name: str, place: Place, train: list[str], head: str) -> Manifest:
    """Return a pod that runs our own launcher, which reads the number of its node from JOB_COMPLETION_INDEX."""
    variables = {"RECMILL_NODES": str(place.nodes), "MASTER_ADDR": head, "MASTER_PORT": str(_PORT), **place.env}
    amounts = {"cpu": place.cpus and str(place.cpus * place.procs), "nvidia.com/gpu": place.gpus and str(place.gpus)}
    amounts |= {"memory": place.memory_gb and f"{place.memory_gb}G"}
    resources = {what: amount for what, amount in amounts.items() if amount}
    mounts = [{"name": f"volume-{i}", "mountPath": mount.partition(":")[2]} for i, mount in enumerate(place.mounts)]
    volumes: list[Manifest] = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": mount.partition(":")[0]}}
        for i, mount in enumerate(place.mounts)
    ]
    container = {
        "name": "train",
        "image": place.image,
        "command": ["python3"],
        "args": [*train, "--procs", str(place.procs)],
        "env": _variables(variables),
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [
            *mounts,
            {"name": "config", "mountPath": _CONFIG_DIRECTORY, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        **({"subdomain": name} if place.kind == "job" else {}),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            *volumes,
            {"name": "config", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
