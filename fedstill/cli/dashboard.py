"""``fedstill dashboard``: a live page of a node, a server or runs, for a browser on this machine."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.core.errors import ArgumentError

if TYPE_CHECKING:
    from fedstill.report.page_server import RenderPage


def dashboard(args: ParsedArgs) -> None:
    """Serve the page until Ctrl+C."""
    folder, in_range = Path(args.positionals[0]), lambda value: 0 <= value < 65536
    port = number("--port", args.get("--port") or "0", int, in_range, "1 to 65535")
    if not folder.is_dir():
        raise ArgumentError(
            "fedstill dashboard", str(folder), "the folder of a node, a server, a run or several"
        )

    from fedstill.report.page_server import PageServer

    with contextlib.ExitStack() as ending:
        pages = _pages(folder, ending)
        try:
            server = ending.enter_context(PageServer(pages, port))
        except OSError as error:
            allowed = f"one that is free on this machine ({error.strerror})"
            raise ArgumentError("--port", port, allowed) from error
        print(
            f"{server.address}\nThis address is for you alone, on this machine; Ctrl+C ends it.", flush=True
        )
        server.serve_forever()


def _pages(folder: Path, ending: contextlib.ExitStack) -> RenderPage:
    """Return the pages of a folder by its kind; ``ending`` closes what they open."""
    from fedstill.federation.provision import FEDERATION
    from fedstill.node.owner_folder import FILE

    if (folder / FILE).is_file():
        return partial(_node, folder)
    return _server(folder, ending) if (folder / FEDERATION).is_file() else partial(_runs, folder)


def _node(folder: Path, path: str, nonce: str) -> str | None:
    from fedstill.core.errors import DeployError
    from fedstill.federation import flare_kit, flare_site
    from fedstill.node.overview import read_overview
    from fedstill.report import node_page

    process = None
    with contextlib.suppress(DeployError):  # it has no kit: it answers files
        process = flare_site.process_id(flare_kit.node(folder))
    return None if path else node_page.render_node_page(read_overview(folder), folder, process, nonce)


def _server(folder: Path, ending: contextlib.ExitStack) -> RenderPage:
    from fedstill.federation.server_status import ServerMonitor
    from fedstill.report import runs_page

    watch = ServerMonitor(folder)
    ending.callback(watch.close)  # else its session keeps the process alive

    def pages(path: str, nonce: str) -> str | None:
        if path:
            return runs_page.render_run_page(
                {place.name: place for place in (folder / "runs").glob("*/")}, path, nonce
            )
        return runs_page.render_server_page(watch.read_status(), nonce)

    return pages


def _runs(folder: Path, path: str, nonce: str) -> str | None:
    from fedstill.report import runs_page

    runs = runs_page.find_runs(folder)
    return (
        runs_page.render_run_page(runs, path, nonce)
        if path
        else runs_page.render_runs_page(folder, runs, nonce)
    )
