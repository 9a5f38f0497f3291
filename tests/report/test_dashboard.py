"""``fedstill dashboard``: content, access, no files by path, no markup of other parties."""

from __future__ import annotations

import fcntl
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from fedstill.cli.main import main
from fedstill.cli.tools import _pages
from fedstill.core.errors import QueryRefused
from fedstill.federation import admin
from fedstill.node import owner_folder
from fedstill.node.approvals import ApprovalRequests
from fedstill.node.audit_entries import NODE_DATA, REFUSED, Entry
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.folder_log import SecurityEvents
from fedstill.protocol.run_plan import describe
from fedstill.report import page_server
from fedstill.report.page_server import PageServer
from tests.support.audit_logs import edit
from tests.support.node_services import PLAN
from tests.support.result_files import HOSTILE, Page, a_folder, a_result, unfinished_run

Reply = tuple[int, Mapping[str, str], str]


@contextmanager
def serving(folder: Path) -> Iterator[PageServer]:
    with ExitStack() as ending:
        server = ending.enter_context(PageServer(_pages(folder, ending)))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def call(server: PageServer, path: str | None = None, method: str = "GET", **headers: str) -> Reply:
    """Return status, headers and text of a reply; without a path, of the first page."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)) as link:
        link.request(method, f"/{server.token}/" if path is None else path, headers=headers)
        reply = link.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read().decode()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with two runs: one is finished, one was interrupted."""
    (tmp_path / "later <b>").mkdir()
    a_folder(tmp_path / "done", a_result())
    unfinished_run(tmp_path / "later <b>", note=HOSTILE)
    (tmp_path / "secret").write_text("a secret")
    return tmp_path


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """Return the folder of a node with requests for approval, releases and refusals."""
    folder = tmp_path / "clinic"
    owner_folder.init_folder(folder)
    file = folder / "node.toml"
    text = re.sub(r"(?m)^approve = .*$", 'approve = "each run"', file.read_text())
    file.write_text(re.sub(r"(?m)^total_epsilon = .*$", "total_epsilon = 3.0", text))
    requests = ApprovalRequests(folder, owner_folder.read_node_file(folder))
    with pytest.raises(QueryRefused):
        requests.require_approved(f"run-{HOSTILE}", describe(PLAN, None), "6668 7aad")
    with pytest.raises(QueryRefused):
        requests.require_approved("run-1", describe(PLAN, None), "")
    SecurityEvents(folder).write("refused", HOSTILE, HOSTILE, run=HOSTILE)
    with closing(AuditLog(folder / FILE)) as audit:
        output = {"run": "trial-1", "payer": NODE_DATA, "node": "clinic", "query": "predict_logits"}
        for number in range(3):
            cost = {"gaussian(4.0)": 1}
            audit.charge(Entry(**output, number=number, part="response", up={"logits": 1000}, cost=cost))
        audit.append(Entry(**output, number=3, part=REFUSED, rule=HOSTILE))
        audit.charge(
            Entry(**{**output, "run": HOSTILE}, number=0, part="response", up={"counts": 40}, no_guarantee=1)
        )
    return folder


# --- access -------------------------------------------------------------------------------------------


def test_page_is_served_only_locally_under_its_secret_address(runs: Path) -> None:
    with serving(runs) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert call(server)[0] == 200
        port = server.server_address[1]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9000"):  # also through a tunnel
            assert call(server, Host=host)[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "", f"127.0.0.1.evil.example:{port}", "[::1"):
            assert call(server, Host=host)[0] == 421
        token = server.token
        for path in ("/", "", "/x/", f"/{token}", f"/{token[:-1]}/", f"/{token}x/", "/%C3%A9/"):
            status, _, text = call(server, path)
            assert (status, token in text) == (404, False)
        for method in ("POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "TRACE"):
            assert call(server, method=method)[0] == 405
    with (
        pytest.raises(ConnectionRefusedError),
        closing(socket.create_connection(("127.0.0.1", port), timeout=1)),
    ):
        pass


def test_every_reply_keeps_other_sites_and_caches_out(runs: Path) -> None:
    with serving(runs) as server:
        for path in (None, "/"):
            _, headers, _ = call(server, path)
            assert headers.items() >= page_server.HEADERS.items()
            assert headers["Cache-Control"] == "no-store"
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        (first, again) = (call(server) for _ in range(2))
        nonces = [
            re.findall(r"'nonce-(.*?)'", reply[1]["Content-Security-Policy"]) for reply in (first, again)
        ]
        assert nonces[0] != nonces[1]
        assert [re.findall('nonce="(.*?)"', reply[2]) for reply in (first, again)] == nonces
        assert "unsafe-inline" not in first[1]["Content-Security-Policy"].partition("script-src")[2]
        assert server._cached_nonce not in first[2]  # the placeholder stays secret


def test_no_path_opens_a_file(runs: Path) -> None:
    with serving(runs) as server:
        at = f"/{server.token}/"
        assert call(server, at + "run/later%20%3Cb%3E")[0] == 200
        paths = ["secret", "run/secret", "run/", "run/done/config.toml", "run/../secret", "run/..%2Fsecret"]
        paths += ["run/done%2Fresult.json", "run/%2Fetc", "../secret", "run/done%00", "%2e%2e/secret"]
        for path in paths:
            status, _, text = call(server, at + path)
            assert (status, "nobody" in text) == (404, False), path


# --- content ------------------------------------------------------------------------------------------


def test_unfinished_runs_are_shown(runs: Path) -> None:
    with serving(runs) as server:
        page = Page(call(server)[2])
        link = next(link for link in page.attributes("href") if link.startswith("run/later"))
        later = Page(call(server, f"/{server.token}/{link}")[2])
    assert "done" in page.text
    assert "FedIOD done Accuracy 93.4%" in page.text
    assert f"Runs in {runs.resolve()}." in page.text
    assert "distillation 31 of 400" in page.text
    assert "interrupted (fedstill run --resume continues it)" in page.text
    assert "about" not in page.text  # a finished run shows no remaining time
    assert HOSTILE in page.text
    assert "31 of 400" in later.text
    for shown in (page, later):
        assert {"img", "b"}.isdisjoint(tag for tag, _ in shown.tags)
        assert [tag for tag, _ in shown.tags].count("script") == 1


def test_node_page_shows_requests_releases_and_remaining_budget(clinic: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in clinic.rglob("*") if not path.name.startswith(FILE)}
    sha256 = describe(PLAN, None).sha256
    with serving(clinic) as server:
        status, _, html = call(server)
    page = Page(html)
    assert status == 200, page.text
    assert f"fedstill node approve {clinic} {sha256[:32]} --server 66687aad" in page.text
    assert f"fedstill node approve {clinic} {sha256[:32]} --server none" in page.text
    assert "Pending requests 2" in page.text
    assert "Released 3.0 kB 2 runs" in page.text  # 3 x 1000 bytes, and 40
    assert re.search(r"trial-1 \d{4}-\d\d-\d\d 3 logits 3.0 kB none 1 ", page.text)
    assert "counts 40 B 1 0" in page.text
    assert "all runs no guarantee 0" in page.text  # of a budget of 3, after a release without guarantee
    assert "Audit log intact 5 entries" in page.text
    assert page.text.count(HOSTILE) >= 4  # in run, log and request
    assert {"img", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert [tag for tag, _ in page.tags].count("script") == 1
    after = {path: path.stat().st_mtime_ns for path in clinic.rglob("*") if not path.name.startswith(FILE)}
    assert after == before  # no file is written or created


def test_server_page_shows_nodes_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "provision").mkdir()
    (tmp_path / "provision/federation.json").write_text('{"name": "fl", "host": "h", "port": 1}')
    other = "<img src=x onerror=alert(3)>"
    for name in ("one", other):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with (unfinished_run(tmp_path / "runs/one", waiting_for=["north"], excluded=["west"]) / "job.lock").open(
        "w"
    ) as job:
        fcntl.flock(job, fcntl.LOCK_EX)
        (tmp_path / "runs" / other / "stopped.json").write_text(
            json.dumps({"error": "QueryRefused", "text": HOSTILE})
        )

        class Admin:
            def __init__(self, kit: Path) -> None:
                assert kit == tmp_path / "admin"

            def nodes(self) -> dict[str, float]:
                return {"north": 3.0, HOSTILE: 0.0}

            def jobs(self) -> list[dict[str, object]]:
                return [{"name": "one", "status": "RUNNING", "submit_time": 1.0, "job_id": "x1"}]

            def close(self) -> None:
                closed.append(self)

        closed: list[Admin] = []
        monkeypatch.setattr(admin, "Admin", Admin)
        monkeypatch.setattr(admin.flare_site, "server", lambda folder: folder)
        monkeypatch.setattr(admin.flare_site, "process_id", lambda site: 77)
        with serving(tmp_path) as server:
            page = Page(call(server)[2])
            assert call(server, f"/{server.token}/run/one")[0] == 200
            assert call(server, f"/{server.token}/run/two")[0] == 404
            assert not closed
        assert len(closed) == 1, "an open session would keep the process running after Ctrl+C"
    assert "The server runs as process 77." in page.text
    assert "north 3.0 s ago" in page.text
    assert "one FedIOD running, waits for north for " in page.text
    assert ", continues without west" in page.text
    assert "distillation 31 of 400" in page.text
    assert f"refused: {HOSTILE}" in page.text
    assert {"img", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_log_faults_are_at_top_of_page(clinic: Path) -> None:
    edit(clinic / FILE, "UPDATE entries SET line = replace(line, '6668', '6669') WHERE entry = 1")
    with serving(clinic) as server:
        text = Page(call(server)[2]).text
    assert "Audit log not intact" in text
    assert "The audit log is not intact: entry 1 is not as it was written" in text
    edit(clinic / FILE, "UPDATE entries SET line = replace(line, '6669', '6668') WHERE entry = 1")
    (clinic / f"{FILE}.head").unlink()
    with serving(clinic) as server:
        assert f"its head {FILE}.head is missing" in Page(call(server)[2]).text


def test_page_does_not_block_or_wait_for_nodes(clinic: Path) -> None:
    with closing(AuditLog(clinic / FILE)) as audit:
        requests = ApprovalRequests(clinic, owner_folder.read_node_file(clinic))
        with (
            audit._database.write_transaction(),
            requests._locked(),
            serving(clinic) as server,
        ):
            assert call(server)[0] == 200


def test_page_shows_unreadable_files(clinic: Path) -> None:
    (clinic / "node.toml").write_text("name = <b>\n")
    with serving(clinic) as server:
        status, _, html = call(server)
    page = Page(html)
    assert (status, "This page cannot be shown" in page.text, "b" in {tag for tag, _ in page.tags}) == (
        500,
        True,
        False,
    )


def test_slow_pages_are_computed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [1000.0], []

    def page(path: str, nonce: str) -> str:
        made.append(now[0])
        now[0] += 1.0 if len(made) < 3 else 9.0
        return "page"

    monkeypatch.setattr(page_server.time, "monotonic", lambda: now[0])
    with PageServer(page) as server:
        for _ in range(130):
            server.page("", "")
            now[0] += 1.0
    # after 20 s if a page takes 1 s; after 30 s at most
    assert made == [1000.0, 1021.0, 1042.0, 1081.0, 1120.0]


# --- in a browser -------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_browser_runs_only_the_page_script(clinic: Path, tmp_path: Path) -> None:
    with serving(clinic) as server:
        words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        words += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
        shown = subprocess.run([*words, server.address], capture_output=True, text=True, timeout=100)
    assert '<button type="button">Pause</button>' in shown.stdout  # the script shows this button
    assert "<img" not in shown.stdout


def test_error_names_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["dashboard", str(tmp_path), "--port", str(port)])
    assert ended.value.code == 2
    assert f"invalid --port = {port} (expected one that is free on this machine (" in capsys.readouterr().err


# --- slow clients ---------------------------------------------------------------------------------------


def half_a_request(server: PageServer) -> socket.socket:
    link = socket.create_connection(server.server_address[:2], timeout=60)
    link.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode())
    return link


def test_slow_connections_leave_threads_for_requests(runs: Path) -> None:
    with serving(runs) as server, ExitStack() as links:
        before = threading.active_count()
        for _ in range(300):
            links.enter_context(half_a_request(server))
        deadline = time.monotonic() + 60
        while threading.active_count() > before + page_server.MAX_CONNECTIONS and time.monotonic() < deadline:
            time.sleep(0.02)
        assert threading.active_count() <= before + page_server.MAX_CONNECTIONS
        assert call(server)[0] == 200


def test_slow_client_is_disconnected_at_deadline(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_server, "CLIENT_TIMEOUT", 1.5)
    with serving(runs) as server, half_a_request(server) as link:
        link.settimeout(0.05)
        deadline, ended = time.monotonic() + 60, False
        while not ended and time.monotonic() < deadline:
            try:
                link.sendall(b"X")
                ended = link.recv(1000) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert ended
        assert call(server)[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_page_slower_than_deadline_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "CLIENT_TIMEOUT", 1.5)

    def page(path: str, nonce: str) -> str:
        time.sleep(2.0)
        return "<html>slow</html>"

    with PageServer(page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert call(server)[::2] == (200, "<html>slow</html>")
        server.shutdown()


def test_connections_waiting_for_pages_keep_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "MAX_CONNECTIONS", 2)
    made = threading.Event()

    def page(path: str, nonce: str) -> str:
        made.wait(60)
        return "<html>made</html>"

    with PageServer(page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        request = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        links = [socket.create_connection(server.server_address[:2], timeout=60) for _ in range(2)]
        for link in links:
            link.sendall(request)
        deadline = time.monotonic() + 60
        while list(server._deadlines.values()) != [None, None] and time.monotonic() < deadline:
            time.sleep(0.01)
        with socket.create_connection(server.server_address[:2], timeout=60) as third:
            assert third.recv(1) == b""
        made.set()
        for link in links:
            with link, link.makefile("rb") as reply:
                assert reply.read().endswith(b"<html>made</html>")
        server.shutdown()
