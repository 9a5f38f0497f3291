"""A node's folder: its settings, their effects, and the report of all faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from fedstill import models
from fedstill.cli.node_check import node_facts
from fedstill.core.compute import Compute
from fedstill.core.config_tables import commented_toml, read_table, to_table
from fedstill.core.errors import FedstillError, ModelError
from fedstill.core.startup_kit import StartupKit
from fedstill.data import node_data
from fedstill.data.data_spec import DataSpec
from fedstill.models.predictors import Predictor
from fedstill.node import folder_check, model_setup, owner_folder
from fedstill.node.admission import owner_refusals
from fedstill.node.audit_log import AuditLog
from fedstill.node.node_file import NodeFile
from fedstill.node.secure_aggregation import SUM_HISTORY_FILE, SumHistory
from fedstill.privacy.config import MECHANISMS, NoPrivacy
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs import presets
from fedstill.tasks.classification import ClassificationConfig

TEN = tuple(map(str, range(10)))
DIGITS = DataSpec(ClassificationConfig(), TEN, (1, 8, 8), (0.5,), (0.5,))

FACTORIES = """
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

def network(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], classes))

def regression(shape, classes):
    x, y = load_digits(return_X_y=True)
    return LogisticRegression(max_iter=300).fit(x[:200] / 8 - 1, y[:200])

def function(shape, classes):
    return lambda images: images.reshape(len(images), -1)[:, :classes]

def narrow(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], classes - 1))

def fails(shape, classes):
    raise OSError("no such disk")

def number(shape, classes):
    return 7
"""


@pytest.fixture(autouse=True)
def _restore_modules() -> Iterator[None]:
    original_path = list(sys.path)
    yield
    sys.path[:] = original_path
    sys.modules.pop("my_models", None)


def node(folder: Path, text: str = "") -> Path:
    """Create a node's folder with data, a secret and a ``node.toml``, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    images = (digits.images[:40] * 255 / 16).astype(np.uint8)
    np.savez(folder / "data.npz", images=images, labels=digits.target[:40])
    (folder / "my_models.py").write_text(FACTORIES, encoding="utf-8")
    (folder / "secret").write_text("rehearsal 5\n", encoding="ascii")
    (folder / "secret").chmod(0o600)
    (folder / "node.toml").write_text(f'name = "clinic"\nonline = false\n{text}', encoding="utf-8")
    return folder


def make_kit(folder: Path, name: str = "clinic", days: int = 1) -> None:
    """Write a FLARE startup kit with the files that fedstill reads."""
    startup = folder / "kit" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    table = {"client": {"fqsn": name}, "servers": [{"service": {"target": "uni.example:8002"}}]}
    (startup / "fed_client.json").write_text(json.dumps(table), encoding="utf-8")
    (startup / "client.key").touch()
    certificate = authority(days)
    for file in ("client.crt", "rootCA.pem"):
        (startup / file).write_bytes(certificate)


def authority(days: int) -> bytes:
    """Return a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

    key, who, now = Ed25519PrivateKey.generate(), x509.Name([]), datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder(who, who, key.public_key(), 1)
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, None)
    )
    return made.public_bytes(Encoding.PEM)


# --- node.toml ----------------------------------------------------------------------------------------


def test_new_file_holds_every_default(tmp_path: Path) -> None:
    owner_folder.init_folder(tmp_path / "clinic-a")
    file = owner_folder.read_node_file(tmp_path / "clinic-a")
    privacy = NoPrivacy(isolate_rounding=True)  # servers may be malicious
    assert file == NodeFile(name="clinic-a", privacy=privacy, seed=file.seed)
    text = (tmp_path / "clinic-a" / "node.toml").read_text(encoding="utf-8")
    table = presets.parse(text)
    assert set(table) == {part.name for part in dataclasses.fields(NodeFile)}
    for section in ("data", "model", "local", "policy", "privacy", "compute"):
        assert set(table[section]) == set(to_table(getattr(file, section)))
    # Each option and each section has a comment above it.
    lines = text.splitlines()
    bare = [
        line
        for above, line in itertools.pairwise(lines)
        if line and not line.startswith("#") and not above.startswith("#")
    ]
    assert bare == []
    assert max(map(len, lines)) <= 100
    assert "# Passes over the node's own data. Expected: 0 or more and finite.\nepochs = 30.0\n" in text
    assert "Expected: one of adam, sgd." in text
    assert (
        "Refuse further releases once so many bytes have left the node, over all runs; 0 is no limit." in text
    )


@pytest.mark.parametrize("name", MECHANISMS.builtin)
def test_file_holds_mechanism_options_and_choices(name: str) -> None:
    file = NodeFile(name="clinic", privacy=MECHANISMS[name]())
    text = commented_toml(file)
    assert read_table(NodeFile, presets.parse(text)) == file
    assert f'mechanism = "{name}"' in text
    assert "pate:" in text
    assert "# Largest L2 norm of one example's gradient" in text or name == "none"


def test_nodes_have_different_secrets_and_seeds(tmp_path: Path) -> None:
    for name in ("a", "b"):
        owner_folder.init_folder(tmp_path / name)
    first, second = (owner_folder.read_secret(tmp_path / name) for name in ("a", "b"))
    assert first != second
    assert max(first, second) > 2**64
    assert (
        owner_folder.read_node_file(tmp_path / "a").seed != owner_folder.read_node_file(tmp_path / "b").seed
    )
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o777 == 0o600


def test_existing_files_are_kept(tmp_path: Path) -> None:
    owner_folder.init_folder(tmp_path, "clinic")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FedstillError, match=r"node.toml exists"):
        owner_folder.init_folder(tmp_path, "other")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "node.toml").unlink()
    owner_folder.init_folder(tmp_path, "other")
    assert (tmp_path / "secret").read_bytes() == before["secret"]


def test_only_lost_secret_is_replaced(tmp_path: Path) -> None:
    assert owner_folder.init_folder(tmp_path, "clinic")
    settings, lost = (tmp_path / "node.toml").read_bytes(), owner_folder.read_secret(tmp_path)
    (tmp_path / "secret").unlink()
    with pytest.raises(FedstillError, match=r"--name = .other."):
        owner_folder.init_folder(tmp_path, "other")
    assert not (tmp_path / "secret").exists()
    assert not owner_folder.init_folder(tmp_path)
    assert owner_folder.read_secret(tmp_path) != lost
    assert (tmp_path / "node.toml").read_bytes() == settings
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_invalid_name_creates_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FedstillError, match=r"name = 'a b' .*1 to 64"):
        owner_folder.init_folder(tmp_path / "new", "a b")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[data]\npth = "x"', "unknown key 'data.pth': did you mean 'data.path'?"),
        ("[local]\nepochs = true", "invalid local.epochs = True (expected a number"),
        ("[policy]\nmax_bytes = -1", "invalid policy.max_bytes = -1 (expected 0 (no limit) or more"),
        (
            '[model]\noutput_format = "classes"',
            "invalid model.output_format = 'classes' (expected one of 'auto', 'logits'",
        ),
        ("[compute]\nthreads = -2", "compute.threads = -2"),
        (
            '[privacy]\naudit_log = "a\\u0000b"',
            "invalid privacy.audit_log = 'a\\x00b' (expected a path without null",
        ),
        (
            '[privacy]\naudit_log = "~nosuchuser/x"',
            "invalid privacy.audit_log = '~nosuchuser/x' (expected a path",
        ),
        ('[data]\npath = "~nosuchuser/x"', "invalid data.path = '~nosuchuser/x' (expected a path"),
        ('[data]\npath = "a\\u0000b"', "invalid data.path = 'a\\x00b' (expected a path"),
        ('[model]\nweights = "~nosuchuser/x"', "invalid model.weights = '~nosuchuser/x' (expected a path"),
        ("secret = 5", "unknown key 'secret' (expected name, seed"),
        ("a = ", "node.toml is not TOML"),
    ],
)
def test_file_is_read_strictly(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(FedstillError) as caught:
        owner_folder.read_node_file(node(tmp_path, text))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "line"),
    [
        ("-3", 0o600, "does not hold an integer"),
        ("five", 0o600, "does not hold an integer"),
        ("\xe4", 0o600, "does not hold an integer"),
        ("rehearsal", 0o600, "does not hold an integer"),
        (str(2**96 - 1), 0o600, "can be guessed, .* `fedstill node init .*` writes one of 128 random bits"),
        (str(2**96), 0o644, "can be read by others, .* chmod 600"),
        (None, 0, "secret is missing: put it back, or `fedstill node init .*` makes a new one"),
    ],
)
def test_invalid_secret_gives_one_line_error(tmp_path: Path, text: str | None, mode: int, line: str) -> None:
    folder = node(tmp_path)
    (folder / "secret").unlink()
    if text is not None:
        (folder / "secret").write_text(text, encoding="utf-8")
        (folder / "secret").chmod(mode)
    with pytest.raises(FedstillError, match=line):
        owner_folder.read_secret(folder)
    assert len(folder_check.check_folder(folder).faults) == 1


# --- data and model -----------------------------------------------------------------------------------


def test_weights_are_loaded_exactly(tmp_path: Path) -> None:
    folder = node(tmp_path, '[model]\nname = "small-cnn:8"\nweights = "first.safetensors"')
    first = models.build("small-cnn:8", (1, 8, 8), 10, 99)
    save_file(first.state_dict(), folder / "first.safetensors")
    model = model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)
    for name, tensor in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_first_weights_depend_on_seed(tmp_path: Path) -> None:
    def first(seed: int, name: str = "small-cnn:8") -> torch.Tensor:
        folder = node(tmp_path, f'seed = {seed}\n[model]\nname = "{name}"')
        return next(model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS).parameters())

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert torch.equal(first(1, "my_models:network"), first(1, "my_models:network"))
    assert not torch.equal(first(1, "my_models:network"), first(2, "my_models:network"))


def test_custom_mechanism_in_folder_is_found(tmp_path: Path) -> None:
    """Found from any working folder; a missing module is reported like other faults."""
    folder = node(tmp_path / "node", '[privacy]\nmechanism = "flip_of_owner:Flip"\nepsilon = 2.0')
    lab = Path(__file__).parents[2] / "examples" / "my_lab" / "my_lab" / "flip.py"
    (folder / "flip_of_owner.py").write_text(lab.read_text())
    assert owner_folder.read_node_file(folder).privacy.registered_name == "flip_of_owner:Flip"
    assert not [fault for fault in folder_check.check_folder(folder).faults if "mechanism" in fault]
    other = node(tmp_path / "other", '[privacy]\nmechanism = "flap_of_owner:Flip"')
    assert (
        folder_check.check_folder(other).faults[0]
        == f"invalid mechanism = 'flap_of_owner:Flip' (expected a module in {other} or an installed one)"
    )


def test_untrained_model_is_frozen(tmp_path: Path) -> None:
    folder = node(tmp_path, '[model]\nname = "my_models:network"\ntrain = false')
    model = model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False]


def test_factory_may_return_predictor(tmp_path: Path) -> None:
    folder = node(tmp_path, '[model]\nname = "my_models:regression"')
    data, _ = node_data.load_node_data(owner_folder.read_node_file(folder).data, folder, DIGITS)
    model = model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)
    assert isinstance(model, Predictor)
    x, y = load_digits(return_X_y=True)
    twin = LogisticRegression(max_iter=300).fit(x[:200] / 8 - 1, y[:200])
    probabilities = torch.from_numpy(twin.predict_proba(data.inputs.flatten(1).numpy())).float()
    torch.testing.assert_close(model(data.inputs), probabilities.clamp_min(1e-6).log(), rtol=1e-3, atol=1e-3)
    folder = node(tmp_path, '[model]\nname = "my_models:function"\noutput_format = "probabilities"')
    model = model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)
    torch.testing.assert_close(model(torch.full((1, 1, 8, 8), 0.1)), torch.full((1, 10), 0.1).log())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("small-cn", r"invalid model.name = 'small-cn' \(expected one of small-cnn"),
        (
            "my_models:none",
            r"invalid model.name = 'my_models:none' \(expected a name in .* which has no 'none'",
        ),
        (
            "not_here:network",
            r"invalid model.name = 'not_here:network' \(expected a module in .* or an installed one",
        ),
        (
            "my_models:narrow",
            r"model.name 'my_models:narrow' returns outputs of shape \(9,\) .*\(10,\)",
        ),
        ("my_models:fails", "model 'my_models:fails' cannot be built for inputs .*: no such disk"),
        ("my_models:number", r"the model is a int \(expected a torch.nn.Module"),
    ],
)
def test_unsuitable_model_gives_one_line_error(tmp_path: Path, name: str, line: str) -> None:
    folder = node(tmp_path, f'[model]\nname = "{name}"')
    with pytest.raises(FedstillError, match=line):
        model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)


def test_wrong_weights_give_one_line_error(tmp_path: Path) -> None:
    folder = node(tmp_path, '[model]\nname = "small-cnn:8"\nweights = "first.safetensors"')
    path = folder / "first.safetensors"

    def error_message() -> str:
        with pytest.raises(ModelError) as caught:
            model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "file not found" in error_message()
    path.write_bytes(b"no tensors here")
    assert "model.weights 'first.safetensors' is not a safetensors file" in error_message()
    save_file(models.build("mlp:8", (1, 8, 8), 10, 0).state_dict(), path)
    assert (
        "model.weights 'first.safetensors' do not fit the model: 0.weight is missing, and " in error_message()
    )
    save_file(models.build("small-cnn:8", (1, 8, 8), 9, 0).state_dict(), path)
    assert "12.weight is float32 (9, 64) (expected float32 (10, 64)), and 1 more" in error_message()
    state = models.build("small-cnn:8", (1, 8, 8), 10, 0).state_dict()
    save_file(state | {"0.bias": state["0.bias"].half()}, path)
    assert error_message().endswith("0.bias is float16 (8,) (expected float32 (8,))")


# --- faults -------------------------------------------------------------------------------------------


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    folder = node(
        tmp_path,
        '[data]\npath = "none.npz"\nspeed = 3\n'
        '[model]\nname = "huge-cnn"\n'
        '[local]\nlr = "fast"\nbatch = 0\n'
        '[compute]\ndevice = "abacus"\n',
    )
    pytest.importorskip("nvflare")
    (folder / "secret").unlink()
    text = (folder / "node.toml").read_text(encoding="utf-8").replace("online = false", "online = true")
    (folder / "node.toml").write_text(text, encoding="utf-8")
    faults = folder_check.check_folder(folder).faults
    for line, wanted in zip(
        faults,
        (
            "unknown key 'data.speed'",
            "invalid local.lr = 'fast' (expected a number",
            "invalid local.batch = 0 (expected 1 or more",
            "secret is missing",
            "data.path 'none.npz': file not found",
            "invalid model.name = 'huge-cnn' (expected one of small-cnn",
            "invalid compute.device = 'abacus' (expected a device of this machine: cpu",
            "kit holds no startup kit",
        ),
        strict=True,
    ):
        assert wanted in line
        assert "\n" not in line
    assert folder_check.check_folder(folder, quick=True).faults == faults
    model = faults.index(next(line for line in faults if "model.name" in line))
    known = folder_check.check_folder(
        folder, DIGITS
    ).faults  # if inputs are known to be images, only networks for images are listed
    assert known[:model] + known[model + 1 :] == faults[:model] + faults[model + 1 :]
    assert "transformer" in faults[model]
    assert known[model].startswith("invalid model.name = 'huge-cnn' (expected one of small-cnn")
    assert "transformer" not in known[model]


def test_invalid_paths_are_faults(tmp_path: Path) -> None:
    text = (
        '[data]\npath = "~nosuchuser/x"\n[compute]\ndevice = "abacus"\n[privacy]\naudit_log = "a\\u0000b"\n'
    )
    data, audit, device = folder_check.check_folder(node(tmp_path, text)).faults
    assert data.startswith("invalid data.path = '~nosuchuser/x'")
    assert audit.startswith("invalid privacy.audit_log = 'a\\x00b'")
    assert device.startswith("invalid compute.device = 'abacus'")


def test_unwritable_audit_log_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = node(tmp_path, '[privacy]\naudit_log = "logs/audit.sqlite"\n')
    (fault,) = folder_check.check_folder(folder).faults
    assert fault == f"privacy.audit_log 'logs/audit.sqlite': folder not found: {folder / 'logs'}"
    (folder / "logs").mkdir()
    assert folder_check.check_folder(folder).faults == ()
    AuditLog(folder / "logs" / "audit.sqlite").close()
    for closed in (folder / "logs", folder / "logs" / "audit.sqlite"):  # root has access to both
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: path != closed)
        (fault,) = folder_check.check_folder(folder).faults
        assert fault == f"privacy.audit_log 'logs/audit.sqlite': {closed} is not writable"
    too_long = node(tmp_path, f'[privacy]\naudit_log = "{"a" * 300}"\n')
    (fault,) = folder_check.check_folder(too_long).faults
    assert fault.startswith("audit log: ")


def test_fault_does_not_cause_second_fault(tmp_path: Path) -> None:
    folder = node(tmp_path, '[data]\npath = 3\n[model]\nname = "my_models:narrow"')
    # The spec is not known.
    assert folder_check.check_folder(folder).faults == ("invalid data.path = 3 (expected a text)",)
    faults = folder_check.check_folder(folder, DIGITS).faults
    assert len(faults) == 2
    assert "returns outputs of shape (9,)" in faults[1]
    (folder / "node.toml").write_text("data = 3\nonline = false\n", encoding="utf-8")
    assert folder_check.check_folder(folder).faults == (
        "invalid name = '' (expected a text)",
        "invalid data = 3 (expected a table)",
    )


def test_data_shape_fault_needs_known_shape(tmp_path: Path) -> None:
    folder = node(tmp_path)
    other = DataSpec(ClassificationConfig(), TEN, (3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    (fault,) = folder_check.check_folder(folder, other).faults
    assert "images are 1 x 8 x 8 (channels, height, width) (expected 3 x 32 x 32" in fault
    report = folder_check.check_folder(folder)
    assert report.spec == DIGITS
    assert report.data is not None
    assert len(report.data) == 40


def test_kit_must_be_complete_and_of_this_node(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    folder = node(tmp_path)
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    make_kit(folder)
    assert folder_check.check_folder(folder).faults == ()
    make_kit(folder, days=-1)
    (fault,) = folder_check.check_folder(folder).faults
    assert "its certificate expired on" in fault
    (folder / "kit" / "startup" / "client.crt").write_text("x")
    (fault,) = folder_check.check_folder(folder).faults
    assert fault.endswith("client.crt is not a certificate")
    make_kit(folder, "other")
    (folder / "kit" / "startup" / "client.key").unlink()
    missing, name = folder_check.check_folder(folder).faults
    assert missing.endswith("client.key is missing: copy the startup kit there again")
    assert name == "invalid name = 'clinic' (expected 'other', as the startup kit has it)"
    kit = StartupKit(folder / "kit")
    assert (kit.node_name, kit.server_address("client")) == ("other", "uni.example:8002")
    make_kit(folder)
    own, toml = kit.authority_fingerprint, 'name = "clinic"\n[policy]\nallowed_servers = ["{}"]\n'
    (folder / "node.toml").write_text(toml.format("a" * 32), encoding="utf-8")
    (fault,) = folder_check.check_folder(folder, quick=True).faults
    assert fault.startswith("invalid policy.allowed_servers = ")
    assert f"expected a list with {own}, the authority of the startup kit" in fault
    (folder / "node.toml").write_text(toml.format(own), encoding="utf-8")
    assert folder_check.check_folder(folder, quick=True).faults == ()
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    for file, text, wanted in (
        ("rootCA.pem", "x", "rootCA.pem is not a certificate"),
        ("fed_client.json", "{}", "fed_client.json has no servers: copy the startup kit again"),
        ("fed_client.json", "{", "fed_client.json is not JSON: copy the startup kit again"),
    ):
        kit.path(file).write_text(text, encoding="utf-8")
        (fault,) = folder_check.check_folder(folder).faults
        assert fault.endswith(wanted)
        make_kit(folder)
    kit.path("rootCA.pem").write_bytes(authority(1))
    (fault,) = folder_check.check_folder(folder).faults
    assert fault.endswith("its certificate was not issued by the authority in rootCA.pem")


# --- refused queries --------------------------------------------------------------------------------------


def method_queries(method: str) -> Any:
    setting = NodeSetting(ClassificationConfig().make(10), LocalConfig(), Compute())
    return METHODS[method]().node_side(setting).queries


def test_refused_queries_follow_policy_and_model(tmp_path: Path) -> None:
    folder = node(
        tmp_path, '[policy]\nqueries = ["predict_logits", "train"]\n[model]\nname = "my_models:function"'
    )
    file = owner_folder.read_node_file(folder)
    predictor = model_setup.make_model(file, folder, DIGITS)
    network = models.build("small-cnn:8", (1, 8, 8), 10, 0)
    counts = {"count_labels": "queries: predict_logits, train"}
    through = models.carries_gradient(network, (1, 8, 8))
    assert owner_refusals(file, through, method_queries("fediod")) == counts
    through = models.carries_gradient(predictor, (1, 8, 8))
    assert owner_refusals(file, through, method_queries("fediod")) == {
        **counts,
        "predict_logits": models.PREDICTION_ONLY,
    }
    assert owner_refusals(file, through, method_queries("fedavg")) == {
        "count_samples": "queries: predict_logits, train",
        "train": "outputs_only: parameters may not leave",
    }


def test_model_unfit_for_method_is_reported(tmp_path: Path) -> None:
    folder = node(tmp_path, '[model]\nname = "my_models:function"')
    predictor = model_setup.make_model(owner_folder.read_node_file(folder), folder, DIGITS)
    network = models.build("small-cnn:8", (1, 8, 8), 10, 0)

    def unfit(model: torch.nn.Module, method: str) -> str | None:
        needs = METHODS[method]().needs()
        return model_setup.unfit_reason(model, needs, DIGITS, Compute())

    assert [unfit(network, method) for method in METHODS] == [None] * len(METHODS)
    assert unfit(predictor, "fedkd") is None
    assert "every round trains it" in str(unfit(predictor, "fedavg"))
    assert "every round trains it" in str(unfit(network.requires_grad_(False), "fedavg"))


def test_corrupted_sums_are_reported_to_owner(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    folder = node(tmp_path)
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    make_kit(folder)

    def link() -> list[str]:
        report = folder_check.check_folder(folder)
        assert report.file is not None
        return node_facts(folder, report.file, report)["link"]

    assert "corrupted" not in " ".join(link())
    SumHistory(folder / SUM_HISTORY_FILE).count_corrupted_sum()
    assert (
        link()[-1]
        == "responses of this node have corrupted 1 sum, and all are from now on (max_corrupted_sums: 1)"
    )
