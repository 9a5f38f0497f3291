"""``fedstill offline``: federated distillation with files carried by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import Call, CalledAs, Preset, Quiet, UsageError, group
from fedstill.cli.console import leave
from fedstill.cli.run import changed, configured, finish, out_folder, run_options
from fedstill.core.errors import ArgumentError, QueryFileError
from fedstill.core.hashing import group_digits
from fedstill.core.text_format import format_bytes

if TYPE_CHECKING:
    from fedstill.federation.offline_files import Queries


commands = group(
    "offline",
    """Federated distillation with signed files carried by hand, for one-shot methods.

Every file is signed. Compare the fingerprint of a key once, over another channel than the file's.""",
)


@commands.command
def make(
    preset: Preset,
    /,
    *,
    out: Path = Path("queries.safetensors"),
    key: Path = Path("server.key"),
    call: CalledAs,
) -> None:
    """At the server: write all queries of a run into one signed file.

    example: fedstill offline make digits-fedkd --method.z_max 20

    It takes options of `fedstill run` (--help-all lists all). Send FILE and
    its signature FILE.sig to each node, which runs `fedstill offline answer`.
    `fedstill offline combine` needs FILE.toml, the configuration.

    Args:
        out: FILE to write (default: queries.safetensors)
        key: the server's private key, created at first use (default: server.key, with server.pub)
    """
    config = configured(preset, call, "offline make")

    from fedstill.core.run_writer import write_text
    from fedstill.federation import offline_files, signed_files
    from fedstill.protocol.run_plan import describe
    from fedstill.runs import offline as runs
    from fedstill.runs.run import COMMAND
    from fedstill.runs.spec import to_toml

    path, private = out, key
    queries = runs.build_offline_queries(config)
    own = signed_files.load_or_create_key(private)
    sha256 = offline_files.write_queries(path, queries, own)
    write_text(_config_path_of_queries(path), f"{COMMAND}{call.command}\n\n{to_toml(config)}")
    _print_queries(queries)
    _print_facts(
        {
            "files": _file_and_signature_text(path),
            "SHA-256": sha256,
            "run": group_digits(describe(queries.plan, queries.public).sha256),
            "your key": signed_files.fingerprint(signed_files.public_key_bytes(own)),
        }
    )
    print("Next:")
    print(f"  1. send {path} and its .sig file to each node; read out your key's fingerprint by phone")
    print(f"  2. each node runs `fedstill offline answer DIR {path.name}`, and sends its responses back")
    print(f"  3. {_combine_call(path)}")
    print(f"Step 3 needs {path}, its .sig file and {_config_path_of_queries(path)}. Keep {private} secret.")


def list_combine_options(call: Call) -> str:
    """Return every option of the run whose queries were made (default: the preset demo)."""
    from fedstill.runs.spec import load, load_toml

    queries = call.value("--queries")
    config = load("demo") if queries is None else load_toml(_config_path_of_queries(Path(queries)))
    return run_options(config, call.overrides, f"with the values of {queries or 'demo'}")


@commands.command
def combine(
    *responses: Path,
    queries: Path,
    node_keys: Path | None = None,
    out: Path | None = None,
    quiet: Quiet = False,
    call: CalledAs,
) -> None:
    """At the server: distill the student from the nodes' responses, and write the report.

    example: fedstill offline combine responses-*.safetensors --queries queries.safetensors

    It takes options of `fedstill run` that change nothing at the nodes: student,
    evaluation (--help-all lists all). To resume after a stop, run the same
    command again.

    Args:
        responses: the nodes' files, each with its signature RESPONSES.sig in the same folder
        queries: the file of queries; FILE.sig and FILE.toml of `offline make` must be in the same folder
        node_keys: the nodes' public keys, DIR/NAME.pub; nodes without a key there are refused
        out: folder of the results (default: runs/NAME-seedSEED)
    """
    if not responses:
        raise UsageError("fedstill offline combine", missing="RESPONSES")
    from fedstill.runs import offline as runs
    from fedstill.runs.spec import load_toml

    recipe = _config_path_of_queries(queries)
    if not recipe.is_file():
        raise QueryFileError(f"{recipe} is missing: `fedstill offline make` wrote it next to {queries}")
    asked = load_toml(recipe)
    config = changed(asked, call.overrides, "fedstill offline combine", call.known)
    runs.check_unchanged_options(asked, config)
    folder = out_folder(out, f"runs/{config.name}-seed{config.seed}")
    known = None if node_keys is None else _node_key_fingerprints(node_keys)
    try:
        result = runs.train_from_files(
            config, queries, responses, folder, keys=known, command=call.command, progress=not quiet
        )
    except KeyboardInterrupt:
        leave("stopped; run the same command to resume", 130)
    finish(folder, result)
    if result["files"]["missing"]:
        print(
            f"No responses came from {', '.join(result['files']['missing'])}, whose keys are in {node_keys}."
        )
    if known is None:
        print("The nodes' keys were not compared. Have each node read the fingerprint of its key out:")
        _print_facts({node["node"]: node["signed_by"] for node in result["files"]["responses"]})


def _node_key_fingerprints(folder: Path) -> dict[str, str]:
    """Fingerprints of the public keys in a folder, by the name of the node."""
    from fedstill.federation import signed_files

    found = {
        path.stem: signed_files.fingerprint(signed_files.read_public_key(path))
        for path in sorted(folder.glob("*.pub"))
    }
    if not found:
        raise ArgumentError("--node-keys", str(folder), "a folder with the nodes' public keys, NAME.pub")
    return found


@commands.command
def answer(folder: Path, file: Path, /, *, out: Path | None = None, server_key: str | None = None) -> None:
    """At a node: train, and write the responses to the queries through the gate into a signed file.

    example: fedstill offline answer clinic queries.safetensors

    Send both files back to the server. The same queries again give the same file
    and are not charged again.

    Args:
        folder: folder of the node, with online = false in node.toml
        file: file of queries, with its signature FILE.sig in the same folder
        out: file to write (default: responses-NAME.safetensors); its signature is FILE.sig
        server_key: the server's public key, or its fingerprint as read out by phone
    """
    from fedstill.core.progress import ProgressBar
    from fedstill.federation import offline_files, signed_files
    from fedstill.node.node_service import NodeService

    with closing(NodeService(folder)) as service:
        service.limit_process_memory()  # the process runs this command only
    with ProgressBar(True) as bars:
        reply = offline_files.answer_queries(
            folder,
            file,
            out,
            server_key=None if server_key is None else signed_files.parse_fingerprint(server_key),
            report=lambda percent: bars.update("local training", percent, 100),
        )
    left, mechanisms = reply.released_bytes, reply.replies.mechanisms()
    known = "as expected" if reply.queries.trusted else "not compared yet"
    _print_queries(reply.queries)
    _print_facts(
        {
            "signed by": f"{reply.queries.signer} ({known})",
            "released": ", ".join(f"{kind} {format_bytes(size)}" for kind, size in left.items()) or "nothing",
            "noise": ", ".join(mechanisms) + ("; no guarantee" if mechanisms == ["none"] else ""),
            "cost": reply.cost,
            "files": _file_and_signature_text(reply.path),
            "your key": reply.signer,
        }
    )
    if reply.was_released:
        print("These responses were released before, with the same bytes. Nothing more was charged.")
    print("Next:")
    comparison = "compare the fingerprint after 'signed by' with the server's, by phone"
    steps = [
        *([] if reply.queries.trusted else [comparison]),
        f"send {reply.path} and its .sig file to the server, and read out your key's fingerprint",
        f"the server runs `{_combine_call(file)}`",
    ]
    for number, step in enumerate(steps, 1):
        print(f"  {number}. {step}")


@commands.command
def show(file: Path, /) -> None:
    """Show what a file of queries requests, and who signed it.

    example: fedstill offline show queries.safetensors

    Args:
        file: file of queries, with its signature FILE.sig in the same folder
    """
    from fedstill.federation import offline_files
    from fedstill.protocol.method import METHODS
    from fedstill.protocol.run_plan import describe
    from fedstill.tasks import TASKS

    # Custom methods and tasks are imported only if they are installed, never because a file names them.
    queries = offline_files.read_queries(file, plugins=(*METHODS, *TASKS))
    _print_queries(queries)
    run = group_digits(describe(queries.plan, queries.public).sha256)
    _print_facts({"SHA-256": queries.sha256, "run": run, "signed by": queries.signer})


def _combine_call(queries: Path) -> str:
    """Return the server's command for the responses to a file of queries."""
    return f"fedstill offline combine responses-*.safetensors --queries {queries.name}"


def _file_and_signature_text(path: Path) -> str:
    from fedstill.federation import signed_files

    return f"{path} and {signed_files.signature_path(path).name}, {format_bytes(path.stat().st_size)}"


def _config_path_of_queries(queries: Path) -> Path:
    """Return the path of the run's configuration, kept next to its queries."""
    return queries.with_name(queries.name + ".toml")


def _print_queries(queries: Queries) -> None:
    spec, public = queries.plan.spec, queries.public
    names = Counter(call.query for call in queries.calls)
    facts = {
        "method": str(queries.plan.method["name"]),
        "queries": ", ".join(f"{name} ({count})" for name, count in names.items()),
        "inputs": "none" if public is None else f"{len(public)} public inputs: {public.name}",
        "task": f"{spec.task.registered_name}, {len(spec.classes)} classes, "
        f"inputs {' x '.join(map(str, spec.shape))}",
    }
    _print_facts(facts)


def _print_facts(facts: Mapping[str, str]) -> None:
    for name, value in facts.items():
        print(f"{name:<11} {value}")
