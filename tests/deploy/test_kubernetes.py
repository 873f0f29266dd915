"""The Kubernetes manifests as text: valid by the schema, and consistent with the daemons."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.cluster import ROOT
from tests.commands import run_command

FILES = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
MANIFESTS = [each for file in FILES for each in yaml.safe_load_all(file.read_text())]


def pods():
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in MANIFESTS
        if "template" in each["spec"]
    }


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: each["kind"])
def test_schema_accepts_manifest(manifest):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="the schemas are missing: pip install kubernetes-validate"
    )
    validate.validate(manifest, validate.latest_version(), strict=True)
    misspelled_manifest = {**manifest, "spec": {**manifest["spec"], "replica": 1}}
    with pytest.raises(validate.ValidationError):
        validate.validate(misspelled_manifest, validate.latest_version(), strict=True)


def test_workers_use_the_address_of_the_coordinator_service():
    (service,) = (each for each in MANIFESTS if each["kind"] == "Service")
    (port,) = service["spec"]["ports"]
    address = f"{service['metadata']['name']}:{port['port']}"
    assert address in pods()["samestep-worker"]["containers"][0]["args"]
    (container_port,) = pods()["samestep-coordinator"]["containers"][0]["ports"]
    assert port["targetPort"] == container_port["name"]
    assert f"SAMESTEP_BIND=0.0.0.0:{container_port['containerPort']}" in container_file(
        "coordinator"
    )


def container_file(daemon):
    """Return the text of the daemon's container file."""
    return (ROOT / f"deploy/{daemon}.Containerfile").read_text()


@pytest.mark.parametrize("daemon", ["coordinator", "worker"])
def test_a_pod_runs_as_its_image_expects(daemon):
    pod = pods()[f"samestep-{daemon}"]
    (container,) = pod["containers"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in container_file(daemon)
    mount_paths = {each["mountPath"] for each in container["volumeMounts"]}
    assert set(re.findall(r"^VOLUME (\S+)$", container_file(daemon), re.MULTILINE)) <= mount_paths
    help_text = run_command(daemon, "--help").stdout
    for argument in (*container.get("args", ()), *(each["name"] for each in container["env"])):
        if argument.startswith("--") or (
            argument.startswith("SAMESTEP_") and argument != "SAMESTEP_TOKEN"
        ):
            assert argument in help_text
