"""The measuring tools of recipes/bench: hosts are what they say they are, and nothing of them stays behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "recipes" / "bench"
sys.path.insert(0, str(BENCH))
hosts_module = importlib.import_module("hosts")
meeting_module = importlib.import_module("meeting")
bench_module = importlib.import_module("bench")
bytes_module = importlib.import_module("bytes")
methods_module = importlib.import_module("methods")
sys.path.remove(str(BENCH))

Hosts = hosts_module.Hosts
HostsError = hosts_module.HostsError

SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
for _ in range(500):
    try:
        link = socket.create_connection((address, 5000), timeout=10)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
began = time.monotonic()
link.sendall(bytes(size))
link.shutdown(socket.SHUT_WR)
link.recv(1)
print(time.monotonic() - began)
"""
RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    link, _ = server.accept()
    while link.recv(1 << 20):
        pass
    link.sendall(b"!")
"""
TRAIN = """
import json, os, sys, torch
from lightning.pytorch import LightningModule, Trainer
class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        if len(sys.argv) > 1 and self.global_rank == self.trainer.world_size - 1:
            raise ValueError("the last rank fails")
        return self.line(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
hosts, ranks = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
trainer = Trainer(accelerator="cpu", strategy="ddp", devices=ranks, num_nodes=hosts, max_steps=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(32, 4)))
cluster = type(trainer.strategy.cluster_environment).__name__
found = [cluster, trainer.global_rank, trainer.node_rank, trainer.local_rank]
print("FOUND", json.dumps(found), len(os.sched_getaffinity(0)), os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.fixture
def netns() -> None:
    """Skip, saying why, where network namespaces cannot be made."""
    reason = hosts_module.why_unavailable()
    if reason is not None:
        pytest.skip(reason)


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def run_tool(name: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def transfer_seconds(hosts: Hosts, size: int) -> float:
    """Seconds that `size` bytes need from host 0 to host 1."""
    receiver = hosts.popen(1, [sys.executable, "-c", RECEIVE])
    sender = hosts.popen(
        0, [sys.executable, "-c", SEND, hosts.address(1), str(size)], stdout=subprocess.PIPE, text=True
    )
    seconds = float(sender.communicate(timeout=60)[0])
    receiver.wait(timeout=10)
    return seconds


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 1e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("64kbit", 64e3), ("unlimited", None)],
)
def test_rate_is_read_in_powers_of_a_thousand(text: str, bits: float | None) -> None:
    assert hosts_module.bits_per_second(text) == bits


@pytest.mark.parametrize("text", ["", "100", "100 mbit", "-1mbit", "0mbit", "100Mbit; reboot"])
def test_what_is_not_a_rate_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="Accepted: 'unlimited'"):
        Hosts(2, rate=text)


def test_bad_count_prefix_and_host_are_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="count=0"):
        Hosts(0)
    with pytest.raises(ValueError, match="prefix='eth0'"):
        Hosts(1, prefix="eth0")
    with pytest.raises(ValueError, match=r"host=2 .* 0 to 1"):
        Hosts(2).address(2)


@pytest.mark.netns
def test_two_sets_live_side_by_side_and_leave_nothing_behind(netns: None) -> None:
    before = namespaces()
    with Hosts(2) as first, Hosts(3) as second:
        made = namespaces() - before
        assert len(made) == 2 + 3 + 2  # and a switch each
        assert first.prefix != second.prefix
        first.down()
        assert namespaces() - before == {name for name in made if name.startswith(second.prefix)}
    assert namespaces() == before


@pytest.mark.netns
def test_hosts_that_cannot_be_finished_are_removed_again(netns: None) -> None:
    before = namespaces()
    with pytest.raises(HostsError, match="no-such-control"):
        Hosts(2, congestion="no-such-control").up()
    assert namespaces() == before


@pytest.mark.netns
def test_a_prefix_in_use_is_refused_and_left_alone(netns: None) -> None:
    with Hosts(1) as hosts:
        with pytest.raises(HostsError, match="is in use"):
            Hosts(2, prefix=hosts.prefix).up()
        assert hosts.namespace(0) in namespaces()


@pytest.mark.netns
def test_leaving_the_block_ends_the_processes_inside_with_their_children(netns: None) -> None:
    with Hosts(1) as hosts:
        shell = hosts.popen(0, ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        shell.stdout.close()
    assert shell.returncode == -signal.SIGKILL
    for _ in range(500):  # an orphan stays visible until it has been collected
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail(f"process {child} outlived its host")


@pytest.mark.netns
def test_a_rate_is_applied_and_can_be_lifted(netns: None) -> None:
    size = 3_000_000
    with Hosts(2, rate="100mbit") as hosts:
        limited = transfer_seconds(hosts, size)
        hosts.set_rate("unlimited")
        unlimited = transfer_seconds(hosts, size)
    at_the_wire = 8 * size / 1e8
    assert limited > 0.9 * at_the_wire  # a burst of 128 kB passes at once
    assert limited < 2 * at_the_wire
    assert unlimited < 0.5 * limited


@pytest.mark.netns
def test_counters_count_what_was_sent_and_stand_still_when_idle(netns: None) -> None:
    size = 1_000_000
    with Hosts(2) as hosts:
        idle = [hosts.counters(host) for host in range(2)]
        time.sleep(0.3)
        assert [hosts.counters(host) for host in range(2)] == idle
        transfer_seconds(hosts, size)
        sender, receiver = (hosts.counters(host) - idle[host] for host in range(2))
    assert size < sender.tx_bytes < 1.05 * size
    assert receiver.rx_bytes == sender.tx_bytes
    assert sender.tx_packets > 10


@pytest.mark.netns
def test_command_line_makes_changes_shows_and_removes_hosts(netns: None) -> None:
    before = namespaces()
    prefix = run_tool("hosts", "up", "2", "--rate", "100mbit").stdout.strip()
    try:
        assert run_tool("hosts", "show", prefix).stdout.count("rate 100Mbit") == 4
        assert run_tool("hosts", "rate", prefix, "1gbit").returncode == 0
        assert run_tool("hosts", "show", prefix).stdout.count("rate 1Gbit") == 4
        assert "congctl cubic" in run_tool("hosts", "exec", prefix, "1", "ip", "route").stdout
        assert run_tool("hosts", "exec", prefix, "1", "false").returncode == 1
    finally:
        assert run_tool("hosts", "down", prefix).returncode == 0
    assert namespaces() == before
    refused = run_tool("hosts", "show", prefix)
    assert refused.returncode == 2
    assert "names no hosts that are up" in refused.stderr


@pytest.mark.netns
@pytest.mark.dist
def test_ranks_on_hosts_are_what_lightning_takes_for_a_cluster(netns: None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_tool("launch", "--hosts", "2", "--ranks-per-host", "2", "--logs", str(tmp_path), "--", str(script))
    assert done.returncode == 0, done.stderr
    output = [done.stdout] + [(tmp_path / f"rank{rank}.log").read_text() for rank in (1, 2, 3)]
    for rank, text in enumerate(output):
        found = json.dumps(["TorchElasticEnvironment", rank, rank // 2, rank % 2])
        assert f"FOUND {found} 1 eth0" in text


@pytest.mark.dist
def test_one_failing_rank_ends_all_and_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    began = time.monotonic()
    done = run_tool("launch", "--ranks-per-host", "2", "--logs", str(tmp_path), "--", str(script), "fail")
    assert done.returncode == 1
    assert "rank 1: ValueError: the last rank fails" in done.stderr.replace("[rank1]: ", "")
    assert time.monotonic() - began < 60


@pytest.mark.dist
def test_a_deadline_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import os, time; print(os.getpid()); time.sleep(1000)")
    done = run_tool("launch", "--ranks-per-host", "2", "--deadline", "1", "--logs", str(tmp_path), "--", str(script))
    assert done.returncode == 124
    assert "deadline of 1 s passed; ranks [0, 1]" in done.stderr
    for process in (done.stdout, (tmp_path / "rank1.log").read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


def test_a_meeting_lets_nobody_through_before_the_last_has_come(tmp_path: Path) -> None:
    passed: list[int] = []

    def come(rank: int) -> None:
        meeting_module.Meeting(tmp_path, rank, 3).wait("here", timeout=20)
        passed.append(rank)

    early = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in early:
        thread.start()
    time.sleep(0.2)
    assert passed == []
    come(2)
    for thread in early:
        thread.join(timeout=20)
    assert sorted(passed) == [0, 1, 2]


def test_a_meeting_ends_when_it_is_called_off_or_too_late(tmp_path: Path) -> None:
    first, second = (meeting_module.Meeting(tmp_path, rank, 2) for rank in range(2))
    with pytest.raises(meeting_module.MeetingError, match=r"ranks \[1\] did not reach 'here'"):
        first.wait("here", timeout=0.05)
    second.call_off("out of memory")
    with pytest.raises(meeting_module.MeetingError, match="called off by rank 1: out of memory"):
        first.wait("there", timeout=20)


def rank_result(host: int, median_ms: float, tx_bytes: int, counted: dict[str, int]) -> dict[str, object]:
    place = {"rank": host, "local_rank": 0, "host": host, "world_size": 2, "ranks_per_host": 1, "interface": "eth0"}
    interface = {"tx_bytes": tx_bytes, "rx_bytes": tx_bytes, "tx_packets": 9, "rx_packets": 9}
    return {
        "method": "strict:stub",
        "place": place,
        "median_ms": median_ms,
        "mean_ms": median_ms,
        "steps": 2,
        "own_cpu_s": 0.01,
        "machine_cpu_s": 0.04,
        "interface": interface,
        "counted": counted,
        "predicted": {"sent": 500_000, "network": 500_000} if counted else {},
    }


def test_a_row_pairs_methods_by_round_and_keeps_a_failed_one_in_sight() -> None:
    def rounds(times: list[float], tx_bytes: int) -> list[object]:
        return [bench_module.Round.of([rank_result(h, ms, tx_bytes, {}) for h in (0, 1)], 1) for ms in times]

    measured = {"none": rounds([10, 20, 30], 0), "ddp": rounds([20, 60, 60], 2_500_000), "bad": [None] * 3}
    none, ddp, bad = bench_module.summarise(measured, {"bad": "rank 1: it broke"}, "ddp", "100mbit")
    assert none.ratio == 0.5  # the median of 1/2, 1/3, 1/2; not the ratio of the medians, 1/3
    assert ddp.exposed_ms == 30
    assert ddp.interface_mb == 1.25
    assert ddp.wire_ms == 100
    assert ddp.wire_over_compute == 5
    assert ddp.other_cores == pytest.approx(
        0.02 / 0.12
    )  # two ranks of 10 ms CPU in 40 ms busy, during 2 steps of 60 ms
    assert bad.failure == "rank 1: it broke"
    text = bench_module.table([none, ddp, bad], f"x. {bench_module.CAPTION}", "ddp")
    assert "CPU, gloo, emulated links; NCCL not measured" in text
    assert "FAILED: rank 1: it broke" in text


def test_bytes_agree_only_if_prediction_is_exact_and_the_interface_is_close() -> None:
    counted = {"wire_bytes": 1_000_000, "network_bytes": 1_000_000, "messages": 40}

    def problems(tx_bytes: int, **changed: int) -> list[str]:
        return bytes_module.by_host([rank_result(0, 1, tx_bytes, {**counted, **changed})])[0].problems()

    allowed = 30_000 + 40 * 100
    assert problems(1_000_000 + allowed) == []
    assert "34000 B are allowed" in problems(1_000_000 + allowed + 1)[0]
    assert problems(1_000_000, wire_bytes=999_999) == ["sent: predicted 1000000 B, counted 999999 B"]
    assert problems(1_000_000, network_bytes=1_000_001) == ["network: predicted 1000000 B, counted 1000001 B"]
    with pytest.raises(ValueError, match=r"no counters\.messages, counters\.network_bytes"):
        bytes_module.by_host([rank_result(0, 1, 0, {"wire_bytes": 1})])


def test_an_unknown_method_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"method='strickt' is unknown.*ddp5.*strict:COMPRESSOR"):
        methods_module.find("strickt")
    for call in ("(2)", "(rank=open('x'))", "(rank=)", "(rank=1)(2)"):
        with pytest.raises(ValueError, match="plain values"):
            methods_module.find(f"strict:PowerSGD{call}")
    assert methods_module.find("strict:PowerSGD(rank=2)@5").name == "strict:PowerSGD(rank=2)@5"


PLUGIN = """
from lightning.pytorch.strategies import DDPStrategy
from methods import method

@method("mine")
def mine():
    return DDPStrategy(bucket_cap_mb=1)

@method("broken")
def broken():
    raise RuntimeError("this method cannot be made")

class Counting(DDPStrategy):
    # A stand-in for the strict mode: gloo's ring sends every gradient byte once between two ranks.
    steps = 0

    def optimizer_step(self, *args, **kwargs):
        self.steps += 1
        return super().optimizer_step(*args, **kwargs)

    def per_step(self):
        return 4 * sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def counters(self):
        network = self.steps * self.per_step() if self.num_nodes > 1 else 0
        return Bytes(wire_bytes=self.steps * self.per_step(), network_bytes=network, messages=20 * self.steps)

    def predicted_bytes(self):
        return Bytes(sent=self.per_step(), network=self.per_step() if self.num_nodes > 1 else 0)

class Bytes:
    def __init__(self, **values):
        self.__dict__.update(values)

@method("strict:stub")
def stub():
    return Counting()
"""
SMALL = ("--width", "64", "--layers", "2", "--compute-ms", "10", "--warmup", "2", "--steps", "3", "--deadline", "60")


@pytest.mark.netns
@pytest.mark.dist
def test_bench_measures_plugins_beside_the_incumbents_and_survives_a_broken_one(netns: None, tmp_path: Path) -> None:
    before = namespaces()
    plugin, report = tmp_path / "mine.py", tmp_path / "report.json"
    plugin.write_text(textwrap.dedent(PLUGIN))
    wanted = ("--methods", "ddp", "broken", "mine", "--plugin", str(plugin), "--json", str(report))
    done = run_tool("bench", "--hosts", "2", "--rate", "100mbit", "--rounds", "2", *wanted, *SMALL, timeout=170)
    assert done.returncode == 1, done.stderr
    assert "CPU, gloo, emulated links; NCCL not measured" in done.stdout
    rows = {row["method"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["none", "ddp", "broken", "mine"]
    assert "RuntimeError: this method cannot be made" in rows["broken"]["failure"]
    assert rows["none"]["interface_mb"] == 0
    sent_mb = 4 * 137_344 / 1e6  # one rank of two sends each gradient byte once
    for name in ("ddp", "mine"):
        assert sent_mb < rows[name]["interface_mb"] < 1.1 * sent_mb
        assert rows[name]["median_ms"] > rows["none"]["median_ms"]
    assert namespaces() == before


@pytest.mark.netns
@pytest.mark.dist
def test_bytes_compares_prediction_counters_and_interfaces(netns: None, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(textwrap.dedent(PLUGIN))
    done = run_tool("bytes", "stub", "--plugin", str(plugin), "--layouts", "2x1", "2x2", *SMALL, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agrees") == 3  # two hosts, then one


@pytest.mark.dist
def test_overhead_compares_step_by_step_in_one_pair_of_processes() -> None:
    small = ("--width", "32", "--layers", "1", "--warmup", "2", "--steps", "6", "--limit", "1000", "--deadline", "90")
    done = run_tool("overhead", "--method", "ddp", *small)
    assert done.returncode == 0, done.stderr
    assert "ddp / DDPStrategy, paired: median" in done.stdout
