"""Table of all commands: usage, help and the function of each.

The usage of a command is data: :mod:`fedstill.cli.arguments` parses the words of a call by it, and the help
and shell completion print it. To add a command, add a :class:`Command` here and write its function.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

WIDTH = 96  # columns of a help page

JSON = "  --json          print the result as JSON"
QUIET = "  --quiet         hide progress bars"


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        function: what does it, as ``module:function``; imported when it is called.
        summary: one line, for lists and at the top of the help page.
        usage: forms of the call, each the words after the command's name.
        details: help below the summary: arguments and options.
        example: calls that can be copied.
        all_options: for ``--help-all``, a function of the command's name and parsed words that returns every
            option of the configuration as text.
    """

    function: str
    summary: str
    usage: tuple[str, ...]
    details: str = ""
    example: str = ""
    all_options: str = "fedstill.cli.run:all_options"

    def help(self, name: str) -> str:
        """Help page of the command under its full name, as ``"node init"``."""
        forms = [_wrapped(f"fedstill {name} {form}".strip()) for form in self.usage]
        parts = [
            "usage:\n" + "\n".join(forms),
            self.summary,
            self.details.strip("\n"),
            "example:\n" + textwrap.indent(self.example.strip("\n"), "  "),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


@dataclass(frozen=True)
class CommandGroup:
    """Commands under one word, as ``fedstill node init`` and ``fedstill node start``.

    Args:
        summary: one line, for lists and at the top of the help page.
        commands: by name.
        details: help below the list of commands.
    """

    summary: str
    commands: Mapping[str, Command]
    details: str = ""

    def help(self, name: str) -> str:
        """Help page of the group: one line a command."""
        width = max(map(len, self.commands))
        lines = [f"  {each:<{width}}  {command.summary}" for each, command in self.commands.items()]
        parts = [
            f"usage:\n  fedstill {name} COMMAND ...",
            self.summary,
            "commands:\n" + "\n".join(lines),
            self.details.strip("\n"),
            f"Run `fedstill {name} COMMAND --help` for usage, options and an example.",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def _wrapped(usage: str) -> str:
    """Usage in lines of the help page's width; a part in brackets is never broken."""
    words = usage.replace(" ", "\0")
    depth, text = 0, []
    for sign in words:
        depth += {"[": 1, "]": -1}.get(sign, 0)
        text.append("\xa0" if sign == "\0" and depth else " " if sign == "\0" else sign)
    lines = textwrap.wrap(
        "".join(text), WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )
    return "\n".join(lines).replace("\xa0", " ")


RUN = Command(
    "fedstill.cli.run:run",
    "Run one federation in simulation or on deployed nodes, and write its report.",
    (
        "PRESET|FILE.toml [--OPTION VALUE ...] [--out DIR] [--quiet] [--json]",
        "--resume DIR [--startup-kit DIR] [--quiet] [--json]",
    ),
    f"""
arguments:
  PRESET|FILE.toml            a preset (`fedstill list presets`) or a configuration file

options used most (`fedstill run PRESET --help-all` lists every option with its default):
  --method.name NAME          method (`fedstill list`); --method.OPTION for its options
  --data NAME|PATH            built-in data set, or a file or folder of your own
  --nodes N                   number of nodes
  --split.name NAME           partitioner: iid, dirichlet, shards, ...
  --split.alpha A             Dirichlet concentration; smaller is more non-IID
  --nodes.models NAME ...     network of each node, repeated in turn
  --nodes.local.epochs N      epochs of local training
  --nodes.privacy.mechanism NAME   none, dp-sgd, pate, noisy-outputs
  --nodes.privacy.epsilon E   privacy budget of each node
  --student.model NAME        network of the student (the global model)
  --engine.device DEVICE      cpu, cuda, mps
  --seed N                    seed of all random draws

options of the command:
  --out DIR       folder of the results (default: runs/NAME-seedSEED)
  --resume DIR    resume a stopped run; its metrics are those of an uninterrupted run
  --engine flare --startup-kit DIR   use the nodes of a deployed federation (docs/deploy.md)
{QUIET}
{JSON}
""",
    "fedstill run digits-fediod --nodes 10 --split.alpha 0.1 --seed 1 --out runs/skewed",
)
COMPARE = Command(
    "fedstill.cli.compare:compare",
    "Run several methods on the same data, split and seeds, with confidence intervals.",
    (
        "METHOD|PRESET|FILE.toml ... [--seeds N] [--base PRESET|FILE.toml] [--OPTION VALUE ...] "
        "[--only NAME ...] [--data NAME] [--leakage] [--out DIR] [--quiet] [--json]",
        "--resume DIR [--only NAME ...] [--quiet] [--json]",
    ),
    """
arguments:
  METHOD|PRESET|FILE.toml   methods, or one file that describes a comparison

options:
  --seeds N            run each method with seeds 0 to N-1 (default: 1)
  --base PRESET        take data, split, models and local training from a preset or file (default: digits)
  --METHOD.NAME VALUE  option of one method, as --fediod.steps 200
  --OPTION VALUE       option of `fedstill run` for all methods, as --nodes 10 or --split.alpha 0.1
  --data NAME          short for --data.name
  --only NAME          run only these methods or settings now
  --leakage            attack each run (see `fedstill attack`), also in a finished comparison
  --out DIR            folder of the results (default: runs/compare, or runs/NAME for NAME.toml)
  --resume DIR         resume a stopped comparison
  --quiet              hide progress bars
  --json               print the results as JSON

The exit code is 1 if a method was refused or failed.
""",
    "fedstill compare standalone fedavg fedkd fediod --seeds 3 --split.alpha 0.1",
    all_options="fedstill.cli.compare:all_options",
)
REPRODUCE = Command(
    "fedstill.cli.reproduce:reproduce",
    "List the papers' tables and figures, or rerun one of them.",
    (
        "[NAME|FILE.toml] [--scale small|paper] [--seeds N] [--OPTION VALUE ...] [--out DIR] "
        "[--only NAME ...] [--plan] [--record] [--recorded] [--quiet] [--json]",
    ),
    """
options:
  --scale SCALE   small (default): a reduced setting for two CPU cores; paper: as published, for a GPU
  --seeds N       number of seeds
  --OPTION VALUE  option of `fedstill run`, as --data.root DIR
  --out DIR       folder of the results (default: runs/reproduce)
  --only NAME     run only these methods or settings
  --plan          print the configuration of all runs as TOML, and run nothing
  --record        write the metrics to the record file next to the table's file
  --recorded      print the recorded table with the paper's values, and run nothing
  --quiet         hide progress bars
  --json          print the result as JSON
""",
    "fedstill reproduce fediod-table1 --seeds 3",
    all_options="fedstill.cli.reproduce:all_options",
)
ATTACK = Command(
    "fedstill.cli.attack:main",
    "Attack a finished run with what left its nodes: membership inference, inversion and more.",
    ("RUN [--quick] [--quiet] [--json] [--OPTION VALUE ...]",),
    """
arguments:
  RUN             folder of a finished run on this machine

The run is repeated from its config.toml to observe every release, and the repetition is checked against the
run's audit log. Results go to RUN/leakage.json, images to RUN/leakage.safetensors, and both to
RUN/report.html. Images show private records: consider who receives the report.

options:
  --attacks NAME ...   attacks to run (default: all; `fedstill list attacks`)
  --ATTACK.NAME VALUE  option of one attack; `fedstill attack --help-all` lists all
  --seed N             seed of the attacks
  --quick              fewer shadow models and restarts: a first look, which underestimates leakage
  --quiet              hide progress bars
  --json               print the result as JSON
""",
    "fedstill attack runs/demo --quick",
    all_options="fedstill.cli.attack:all_options",
)
READING = """
  --label COLUMN   column of labels in a CSV file (default: label)
  --image COLUMN   column of image files in a CSV file (default: pixels in columns)
  --fit            resize images, and convert their channels, to the student's input
  --channels N ... channels of the images to use
  --model NAME     the student's network as package.module:factory, if it is not part of fedstill
""".strip("\n")
PREDICT = Command(
    "fedstill.cli.student:predict",
    "Write the student's predictions for new data as a CSV file.",
    (
        "RUN DATA [--out FILE] [--fit] [--label COLUMN] [--image COLUMN] [--channels N ...] "
        "[--model NAME] [--json]",
    ),
    f"""
arguments:
  RUN              folder of a run
  DATA             folder of images, CSV, Parquet or npz file

options:
  --out FILE       CSV file to write (default: DATA-predictions.csv in this folder)
{READING}
  --json           print the result as JSON
""",
    "fedstill predict runs/demo new-images/ --out predictions.csv",
)
EVALUATE = Command(
    "fedstill.cli.student:evaluate",
    "Evaluate the student on other labeled data, in total and by site.",
    (
        "RUN --data DATA [--sites NAME ...] [--fit] [--label COLUMN] [--image COLUMN] "
        "[--channels N ...] [--slices N] [--root DIR] [--model NAME] [--json]",
    ),
    f"""
arguments:
  RUN              folder of a run

options:
  --data DATA      built-in data set, file or folder
  --root DIR       folder of the built-in data sets
  --sites NAME ... evaluate on these sites only
  --slices N       slices of each NIfTI volume
{READING}
  --json           print the result as JSON
""",
    "fedstill evaluate runs/demo --data hospital-d.csv --label diagnosis",
)
EXPORT = Command(
    "fedstill.cli.student:export",
    "Export the student with its preprocessing to ONNX, TorchScript or Hugging Face.",
    ("RUN --format onnx|torchscript|huggingface [--out FILE] [--model NAME] [--json]",),
    """
arguments:
  RUN              folder of a run

options:
  --format FORMAT  onnx, torchscript or huggingface
  --out FILE       file or folder to write (default: in the run's folder)
  --model NAME     the student's network as package.module:factory, if it is not part of fedstill
  --json           print the result as JSON
""",
    "fedstill export runs/demo --format onnx --out student.onnx",
)
LIST = Command(
    "fedstill.cli.tools:names",
    "List methods, tasks, data sets, models, attacks and presets, or describe one method.",
    ("[METHOD|KIND] [--json]",),
    """
arguments:
  METHOD   a method: what leaves a node, what it needs, its options
  KIND     methods, presets, tasks, data, splits, models, ensembles, mechanisms or attacks
""",
    "fedstill list fedkd\nfedstill list models",
)
CONFIG = Command(
    "fedstill.cli.run:config",
    "Print the complete configuration of a run as TOML.",
    ("PRESET|FILE.toml [--OPTION VALUE ...]",),
    example="fedstill config digits-fedkd --nodes 10 > mine.toml\nfedstill run mine.toml",
)
REPORT = Command(
    "fedstill.cli.run:report",
    "Rewrite the HTML report of a run or comparison, or write its figures as files for a paper.",
    ("DIR [--figures pdf|svg|png] [--out DIR]",),
    """
arguments:
  DIR              folder of a run or a comparison

options:
  --figures FORMAT write the figures as pdf, svg or png files instead of the report
  --out DIR        folder of the figures (default: DIR/figures)
""",
    "fedstill report runs/demo --figures pdf",
)
DASHBOARD = Command(
    "fedstill.cli.tools:dashboard",
    "Serve a live page of a node, a server or runs to a browser on this machine.",
    ("DIR [--port N]",),
    """
arguments:
  DIR        folder of a node, a server, a run, or several runs

options:
  --port N   port on this machine (default: a free one)
""",
    "fedstill dashboard runs",
)
DATA = CommandGroup(
    "Draft the schema of a table.",
    {
        "schema": Command(
            "fedstill.cli.tools:schema",
            "Draft the schema of a CSV or Parquet table, for you to correct.",
            ("FILE ... --target COLUMN [--event COLUMN] [--out FILE]",),
            """
arguments:
  FILE ...         tables with the same columns

options:
  --target COLUMN  column to predict
  --event COLUMN   survival: column that says whether the event was observed
  --out FILE       schema to write (default: schema.toml next to the first table)
""",
            "fedstill data schema north.csv south.csv --target diagnosis",
        ),
    },
)
DOCTOR = Command(
    "fedstill.cli.tools:doctor",
    "Show installed versions and devices, and which extras are missing.",
    ("[--json]",),
    example="fedstill doctor",
)
COMPLETION = Command(
    "fedstill.cli.tools:completion",
    "Print a completion script for bash, zsh or fish.",
    ("bash|zsh|fish",),
    example='eval "$(fedstill completion bash)"',
)
NODE = CommandGroup(
    "Set up, check and run a node. A node is a folder that belongs to the owner of its data.",
    {
        "init": Command(
            "fedstill.cli.node:init",
            "Create a node's folder: node.toml with every option explained, and its secret.",
            ("DIR [--name NAME]",),
            """
options:
  --name NAME   name of the node (default: the folder's name)

If only the secret is missing, a new one is written. Runs that have begun cannot resume then.
""",
            "fedstill node init clinic --name north",
        ),
        "check": Command(
            "fedstill.cli.node_check:check",
            "Check a node's configuration, and show the queries that it would refuse. Trains nothing.",
            ("DIR [RUN.toml|PRESET] [--json]",),
            """
arguments:
  DIR              folder of the node
  RUN.toml|PRESET  check against this run (default: each method)
""",
            "fedstill node check clinic digits-fedkd",
        ),
        "start": Command(
            "fedstill.cli.node:start",
            "Join the federation of the startup kit in DIR/kit, until Ctrl+C.",
            ("DIR",),
            example="fedstill node start clinic",
        ),
        "status": Command(
            "fedstill.cli.node:status",
            "Show whether the node runs and reaches its server. The exit code is 1 if not.",
            ("DIR [--json]",),
            example="fedstill node status clinic",
        ),
        "requests": Command(
            "fedstill.cli.node:requests",
            "List the runs that wait for your approval, with their servers and queries.",
            ("DIR [HASH] [--json]",),
            """
arguments:
  DIR    folder of the node
  HASH   print the canonical description of this run; HASH is its SHA-256
""",
            "fedstill node requests clinic",
        ),
        "approve": Command(
            "fedstill.cli.node:approve",
            "Approve a run of one server.",
            ("DIR HASH [--server FINGERPRINT] [--because TEXT]",),
            """
arguments:
  DIR                   folder of the node
  HASH                  SHA-256 of the run; compare it with the server's operators by phone

options:
  --server FINGERPRINT  the server, if several request the same run; "none": a server without proof
  --because TEXT        reason, kept in the audit log
""",
            "fedstill node approve clinic 3f2a-91c0 --because 'study 12, ethics vote 2026-031'",
        ),
        "reject": Command(
            "fedstill.cli.node:reject",
            "Reject a run, also one that is in progress.",
            ("DIR HASH [--server FINGERPRINT] [--because TEXT]",),
            """
options:
  --server FINGERPRINT  the server, if several request the same run
  --because TEXT        reason, kept in the audit log
""",
            "fedstill node reject clinic 3f2a-91c0",
        ),
        "log": Command(
            "fedstill.cli.node:log",
            "Show the security events in the audit log: joins, refusals and approvals.",
            ("DIR [HASH] [--json]",),
            """
arguments:
  DIR     folder of the node
  HASH    hash of an entry that you noted elsewhere; must be part of the log

options:
  --json  print the events as JSON

The exit code is 2 if an entry of the audit log was changed or is missing.
""",
            "fedstill node log clinic",
        ),
    },
)
AUDIT = CommandGroup(
    "Show, verify and export a node's audit log: every release and its privacy cost.",
    {
        "show": Command(
            "fedstill.cli.audit:show",
            "Show the last releases, the total epsilon, and what is left of the privacy budgets.",
            ("PATH [--last N] [--delta D] [--json]",),
            """
options:
  --last N   number of entries (default: 20; 0 shows all)
  --delta D  delta of the totals (default: the node's, or 1e-5)
  --json     print as JSON
""",
            "fedstill audit show clinic --last 5",
        ),
        "verify": Command(
            "fedstill.cli.audit:verify",
            "Verify that the log is complete and unchanged. The exit code is 2 if not.",
            ("PATH [--json]",),
            example="fedstill audit verify clinic",
        ),
        "export": Command(
            "fedstill.cli.audit:export",
            "Export releases, charges and refused queries as JSON lines.",
            ("PATH --out FILE [--whole]",),
            """
options:
  --out FILE  file to write, NAME.jsonl
  --whole     also export security events, and the fingerprints by which entries can be checked. Keep that
              file private: with the node's secret it confirms guesses of your records
""",
            "fedstill audit export clinic --out clinic.jsonl",
        ),
        "accept": Command(
            "fedstill.cli.audit:accept",
            "Accept a damaged log as its owner. Known privacy costs are charged again.",
            ("PATH --because TEXT",),
            """
options:
  --because TEXT  reason, kept in the log
""",
            "fedstill audit accept clinic --because 'disk replaced, restored from backup'",
        ),
    },
    "PATH is a node's folder, a run's folder, or the .sqlite file of a log.",
)
PRIVACY = CommandGroup(
    "Plan epsilon before training, convert noise to epsilon, and audit the mechanisms.",
    {
        "plan": Command(
            "fedstill.cli.privacy_plan:plan",
            "Compute the epsilon that a run will cost each node. Trains nothing.",
            ("[NODE] RUN [--epsilon E] [--noise N] [--steps N] [--json] [--OPTION VALUE ...]",),
            """
arguments:
  NODE            a node's folder or node.toml (default: all nodes of a simulation)
  RUN             a preset or a run's TOML file

options; two of epsilon, noise and steps determine the third:
  --epsilon E     privacy budget of the run
  --noise N       noise multiplier; PART=N,PART=N for several parts (training, critic, pate, gradients,
                  outputs)
  --steps N       length of the run: steps, rounds or predictions of the method, or local epochs
  --OPTION VALUE  option of `fedstill run`
  --json          print the plan as JSON

The exit code is 2 if a node would refuse the run.
""",
            "fedstill privacy plan digits-fedkd-private --epsilon 3",
        ),
        "cost": Command(
            "fedstill.cli.privacy:cost",
            "Convert noisy releases to epsilon.",
            ("EVENT [TIMES] ... [--delta D] [--json]",),
            """
arguments:
  EVENT [TIMES] ...  noise of a release, "gaussian(1.0, rate=0.01)" or "laplace(50.0)", and how many times

options:
  --delta D          delta (default: 1e-5)
  --json             print as JSON
""",
            'fedstill privacy cost "gaussian(1.0, rate=0.01)" 1000',
        ),
        "audit": Command(
            "fedstill.cli.privacy:audit",
            "Attack each mechanism on neighboring data sets, and compare a lower bound with its epsilon.",
            ("[--mechanism NAME] [--seed N] [--out FILE] [--json]",),
            """
options:
  --mechanism NAME  counts, dp-sgd, critic, pate or noisy-outputs (default: all, a few minutes)
  --seed N          seed of data and noise (default: 0)
  --out FILE        write the results as JSON
  --json            print the results as JSON

A lower bound above the claimed epsilon is a fault, and the exit code is 2.
""",
            "fedstill privacy audit --mechanism dp-sgd",
        ),
    },
)
SERVER = CommandGroup(
    "Create a federation on NVIDIA FLARE and run its server.",
    {
        "init": Command(
            "fedstill.cli.server:init",
            "Create a federation: certificates, and a startup kit for each node.",
            ("DIR --host NAME --nodes A B C [--port N]",),
            """
options:
  --host NAME    name or IPv4 address at which the nodes reach the server
  --nodes A B C  names of the nodes: letters, digits, - and _
  --port N       the one port that the server opens (default: 8002)
""",
            "fedstill server init federation --host fl.example.org --nodes north south east",
        ),
        "start": Command(
            "fedstill.cli.server:start",
            "Run the server until Ctrl+C.",
            ("DIR",),
            example="fedstill server start federation",
        ),
        "status": Command(
            "fedstill.cli.server:status",
            "Show connected nodes and the outcome of runs. The exit code is 1 if the server does not run.",
            ("DIR [--json]",),
            example="fedstill server status federation",
        ),
        "stop": Command(
            "fedstill.cli.server:stop",
            "Stop the server and the runs on it.",
            ("DIR",),
            example="fedstill server stop federation",
        ),
        "add": Command(
            "fedstill.cli.server:add",
            "Create startup kits for more nodes, or with new certificates for known ones.",
            ("DIR --nodes D E",),
            example="fedstill server add federation --nodes west",
        ),
        "renew": Command(
            "fedstill.cli.server:renew",
            "Renew the certificates of the server and the admin.",
            ("DIR",),
            example="fedstill server renew federation",
        ),
        "revoke": Command(
            "fedstill.cli.server:revoke",
            "Exclude a node from the federation.",
            ("DIR NODE",),
            example="fedstill server revoke federation west",
        ),
        "readmit": Command(
            "fedstill.cli.server:readmit",
            "Admit a revoked node again.",
            ("DIR NODE",),
            example="fedstill server readmit federation west",
        ),
    },
)
OFFLINE = CommandGroup(
    "Federated distillation with signed files carried by hand, for one-shot methods such as FedKD.",
    {
        "make": Command(
            "fedstill.cli.offline:make",
            "At the server: write all queries of a run into one signed file.",
            ("PRESET|FILE.toml [--OPTION VALUE ...] [--out FILE] [--key FILE]",),
            """
options:
  --out FILE      file to write (default: queries.safetensors); its signature is FILE.sig, and FILE.toml
                  is the configuration for `offline combine`
  --key FILE      the server's private key, created at first use (default: server.key, with server.pub)
  --OPTION VALUE  option of `fedstill run`

Send FILE and FILE.sig to each node. The nodes run `fedstill offline answer`.
""",
            "fedstill offline make digits-fedkd --method.z_max 20 --out queries.safetensors",
        ),
        "show": Command(
            "fedstill.cli.offline:show_offline_queries",
            "Show what a file of queries requests, and who signed it.",
            ("FILE",),
            """
arguments:
  FILE   file of queries, with its signature FILE.sig in the same folder
""",
            "fedstill offline show queries.safetensors",
        ),
        "answer": Command(
            "fedstill.cli.offline:answer",
            "At a node: train, and write the responses to the queries through the gate into a signed file.",
            ("DIR FILE [--out FILE] [--server-key FILE|FINGERPRINT]",),
            """
arguments:
  DIR           folder of the node, with online = false in node.toml: then `fedstill node check` asks
                for no startup kit
  FILE          file of queries, with its signature FILE.sig in the same folder

options:
  --out FILE    file to write (default: responses-NAME.safetensors); its signature is FILE.sig
  --server-key  the server's public key, or its fingerprint as read out by phone

Send both files back to the server. The same queries again give the same file and are not charged again.
""",
            "fedstill offline answer clinic queries.safetensors",
        ),
        "combine": Command(
            "fedstill.cli.offline:combine",
            "At the server: distill the student from the nodes' responses, and write the report.",
            ("RESPONSES ... --queries FILE [--OPTION VALUE ...] [--node-keys DIR] [--out DIR] [--quiet]",),
            """
arguments:
  RESPONSES ...    the nodes' files, each with its signature RESPONSES.sig in the same folder

options:
  --queries FILE   the file of queries; FILE.sig and FILE.toml of `offline make` must be in the same folder
  --node-keys DIR  the nodes' public keys, DIR/NAME.pub; nodes without a key there are refused
  --OPTION VALUE   option of `fedstill run` that changes nothing at the nodes: student, evaluation
  --out DIR        folder of the results (default: runs/NAME-seedSEED)
  --quiet          hide progress bars

To resume after a stop, run the same command again.
""",
            "fedstill offline combine responses-*.safetensors --queries queries.safetensors",
            "fedstill.cli.offline:combine_options",
        ),
    },
    "Every file is signed. Compare the fingerprint of a key once, over another channel than the file's.",
)

SECTIONS: Mapping[str, Mapping[str, Command | CommandGroup]] = {
    "experiments": {"run": RUN, "compare": COMPARE, "attack": ATTACK, "reproduce": REPRODUCE},
    "students": {"predict": PREDICT, "evaluate": EVALUATE, "export": EXPORT},
    "data owners": {"node": NODE, "audit": AUDIT, "privacy": PRIVACY},
    "coordinators": {"server": SERVER, "offline": OFFLINE},
    "tools": {
        "list": LIST,
        "config": CONFIG,
        "report": REPORT,
        "dashboard": DASHBOARD,
        "data": DATA,
        "doctor": DOCTOR,
        "completion": COMPLETION,
    },
}
COMMANDS: Mapping[str, Command | CommandGroup] = {
    name: command for section in SECTIONS.values() for name, command in section.items()
}


def overview() -> str:
    """Help of ``fedstill`` itself: three examples, then one line a command."""
    lines = [
        "fedstill: federated distillation. One global model from private data that stays with its owners.",
        "examples:",
        "  fedstill run demo                               5 nodes on this machine, one minute, a report",
        "  fedstill compare fedavg fedkd fediod --seeds 3  methods under equal conditions",
        "  fedstill attack runs/demo                       what an attacker learns from what left the nodes",
    ]
    for section, commands in SECTIONS.items():
        lines.append(f"{section}:")
        lines += [f"  {name:<11} {command.summary}" for name, command in commands.items()]
    lines.append("Run `fedstill COMMAND --help` for usage, options and an example; `fedstill --version`.")
    return "\n".join(lines) + "\n"
