"""A real SLURM cluster on one machine: every node a set of namespaces with its own network, host name and processes.

    with Cluster(nodes=2) as cluster:
        job = cluster.sbatch(["recipes/strict-bf16.sbatch"], cwd=folder)
        print(cluster.wait(job, deadline=120))

slurmctld, one slurmd per node and munged are the distribution's own (Debian, Ubuntu: slurm-wlm, munge, iproute2).
Networks are those of `recipes.bench.hosts`: host 0 is the login node with the controller, host N is nodeN. Nothing is
added to the machine's own network namespace, names and folders are random, and only what was started here is ended, so
that several clusters and sets of emulated hosts can be up at once. Needs root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.bench.hosts import Hosts, HostsError, InterfaceCounters, end_session

PACKAGES = ("slurm-wlm", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
SRUN_FOLDER = Path("/usr/lib/lightning-sync-tests")
# States after which a job does nothing more by itself.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
_SETTLES_WITHIN = 30.0


class ClusterError(RuntimeError):
    """The cluster could not be brought up, or a command on it failed."""


def install() -> None:
    """Install the daemons by apt, if they are missing; their services are not started.

    srun goes to a folder of its own that is not on PATH: Lightning warns wherever it finds srun and is not started by
    it, and in tests warnings are errors.

    Raises:
        ClusterError: There is no apt here, or it failed.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{', '.join(missing)} not found; install SLURM (slurmctld, slurmd), munge and iproute2.")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet: dict[str, Any] = {"check": True, "env": env, "stdout": subprocess.DEVNULL}
    SRUN_FOLDER.mkdir(exist_ok=True)
    divert = ["dpkg-divert", "--local", "--rename", "--divert", str(SRUN_FOLDER / "srun"), "--add", "/usr/bin/srun"]
    try:
        subprocess.run(divert, **quiet)
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], **quiet)
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"apt-get could not install {', '.join(PACKAGES)}: {error}") from error


class Cluster:
    """A cluster that is up between entering and leaving the block.

    Two partitions: ``normal`` (default; its jobs can be preempted, with 30 s of grace) and ``urgent`` (preempts them).

    Args:
        nodes: Compute nodes, named node1, node2, ...
        cpus: CPUs that each node claims to have.
        gpus: GPUs that each node claims to have (character devices that do nothing; jobs see CUDA_VISIBLE_DEVICES).
        user_signal: Whether preemption sends a job's own ``--signal`` first.
    """

    def __init__(self, nodes: int = 2, *, cpus: int = 8, gpus: int = 2, user_signal: bool = True) -> None:
        self.nodes = nodes
        self._hosts = Hosts(nodes + 1)
        self._base = Path()
        self._cpus, self._gpus, self._user_signal = cpus, gpus, user_signal
        self._daemons: dict[str, subprocess.Popen[Any]] = {}

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # ---- up and down -------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Bring it up and wait until all nodes are idle.

        Raises:
            ClusterError: A daemon ended, or a node did not become idle within 30 s; the message has its log's end.
        """
        if os.geteuid() != 0:
            raise ClusterError("namespaces need root; run the command as root.")
        install()
        try:
            self._hosts.up()
            # munged and slurmd refuse folders that others can write to.
            self._base = Path(tempfile.mkdtemp(prefix=f"{self._hosts.prefix}-"))
            self._base.chmod(0o755)
            self._configure()
            self._start("munged", None, *self._munged())
            self._until(lambda: (self._base / "munge.sock").exists(), "munged is listening")
            self._start("slurmctld", 0, "slurmctld", "-D")
            for node in range(1, self.nodes + 1):
                self._start(f"node{node}", node, "slurmd", "-D")
            self._until(self._all_idle, "all nodes are idle")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End what was started here and remove it."""
        for process in reversed(self._daemons.values()):
            end_session(process)
        self._daemons.clear()
        self._hosts.down()
        for host in range(self.nodes + 1):
            shutil.rmtree(self._etc(host), ignore_errors=True)
        if self._base != Path():
            shutil.rmtree(self._base, ignore_errors=True)

    def power_off(self, node: int) -> None:
        """Cut a node's link, then end everything on it, so that no peer is told; SLURM notices after 20 s or so."""
        self._link(node, "down")
        end_session(self._daemons.pop(f"node{node}"))

    def power_on(self, node: int) -> None:
        """Connect it again and start its slurmd; waits until it is idle."""
        self._link(node, "up")
        self._start(f"node{node}", node, "slurmd", "-D")
        self._until(self._all_idle, f"node{node} is back")

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def run(
        self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 60
    ) -> str:
        """Run a command on the login node and return its output.

        Raises:
            ClusterError: It failed; the message has its output.
        """
        done = self.try_run(*command, cwd=cwd, env=env, timeout=timeout)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def try_run(
        self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, whatever comes of it."""
        return subprocess.run(
            self._hosts.command(0, ["unshare", "--uts", "bash", "-c", 'hostname ctl; exec "$@"', "login", *command]),
            cwd=cwd,
            env={**self.environment(), **(env or {})},
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    def environment(self) -> dict[str, str]:
        """What commands on the login node find, without anything of the process that the tests run in."""
        mine = ("SLURM_", "SBATCH_", "SRUN_", "TORCHELASTIC_", "LIGHTNING_SYNC_", "MASTER_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
        path = os.pathsep.join([str(SRUN_FOLDER), os.environ.get("PATH", os.defpath)])
        return {**kept, "PATH": path, "SLURM_CONF": str(self._base / "slurm.conf")}

    def sbatch(self, arguments: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
        """Submit a job and return its id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip().split(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """What SLURM knows about a job (of an array: about its first element that is listed)."""
        line = self.run("scontrol", "-o", "show", "job", job).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def states(self, job: str) -> list[str]:
        """The state of a job, or of all elements of an array."""
        return re.findall(r"JobState=(\S+)", self.run("scontrol", "-o", "show", "job", job))

    def wait(self, job: str, *, deadline: float) -> str:
        """Wait until a job has ended for good, and return its state; of an array, the worst one.

        Raises:
            ClusterError: It has not ended by the deadline; it is cancelled.
        """
        until = time.monotonic() + deadline
        while not set(states := self.states(job)) <= ENDED:
            if time.monotonic() > until:
                shown = self.show(job)
                self.run("scancel", job)
                raise ClusterError(f"job {job} has not ended within {deadline:g} s: {states}; {shown}")
            self._alive()
            time.sleep(0.25)
        return next((s for s in states if s != "COMPLETED"), "COMPLETED")

    def release(self, job: str) -> bool:
        """Let a requeued job start now, instead of after its credentials have expired; whether it was waiting."""
        if self.states(job) != ["PENDING"]:
            return False
        self.try_run("scontrol", "update", f"jobid={job}", "starttime=now")
        return True

    def counters(self, node: int) -> InterfaceCounters:
        """What a node's network interface has carried."""
        return self._hosts.counters(node)

    def logs(self, lines: int = 20) -> str:
        """The end of every daemon's log."""
        parts = []
        for path in sorted((self._base / "log").glob("*")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
        return "\n".join(parts)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _munged(self) -> list[str]:
        base = self._base
        key = base / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        return [
            "munged",
            "--foreground",
            f"--key-file={key}",
            f"--socket={base / 'munge.sock'}",
            f"--pid-file={base / 'munged.pid'}",
            f"--seed-file={base / 'munge.seed'}",
            f"--log-file={base / 'log' / 'munged.log'}",
        ]

    def _configure(self) -> None:
        base = self._base
        for name in ("log", "spool", "dev"):
            (base / name).mkdir()
        (base / "state").mkdir(mode=0o700)
        (base / "slurm.conf").write_text(
            slurm_conf(base, self._addresses(), cpus=self._cpus, gpus=self._gpus, user_signal=self._user_signal)
        )
        # Never used with proctrack/linuxproc, but slurmd ends without a cgroup file system otherwise.
        (base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        lines = []
        for gpu in range(self._gpus):  # twins of /dev/null: SLURM wants a device
            os.mknod(base / "dev" / f"gpu{gpu}", 0o20666, os.makedev(1, 3))
        if self._gpus:
            files = base / "dev" / f"gpu[0-{self._gpus - 1}]"
            lines = [f"NodeName=node[1-{self.nodes}] Name=gpu File={files} Flags=nvidia_gpu_env"]
        (base / "gres.conf").write_text("\n".join([*lines, ""]))
        names = "".join(f"{address} {name}\n" for name, address in self._addresses().items())
        for host in range(self.nodes + 1):  # `ip netns exec` puts these in place of the machine's own
            self._etc(host).mkdir(parents=True)
            (self._etc(host) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (self._etc(host) / "resolv.conf").write_text("")

    def _addresses(self) -> dict[str, str]:
        names = ["ctl", *(f"node{n}" for n in range(1, self.nodes + 1))]
        return {name: self._hosts.address(host) for host, name in enumerate(names)}

    def _etc(self, host: int) -> Path:
        return Path("/etc/netns") / self._hosts.namespace(host)

    def _start(self, name: str, host: int | None, *command: str) -> None:
        """Start a daemon that ends with this process; on a host, as a machine of its own with all its processes."""
        full = list(command)
        if host is not None:
            node = "ctl" if host == 0 else name
            # bash is process 1, and collects what jobs leave behind. Killing unshare kills it, and with it the node.
            boot = ["bash", "-c", 'hostname "$1"; shift; "$@" & wait $!', "init", node, *command]
            full = self._hosts.command(
                host, ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *boot]
            )
            (self._base / "spool" / node).mkdir(exist_ok=True)
        with (self._base / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *full],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _link(self, node: int, state: str) -> None:
        subprocess.run(
            ["ip", "-n", f"{self._hosts.prefix}-switch", "link", "set", f"port{node}", state], check=True, timeout=10
        )

    def _all_idle(self) -> bool:
        done = self.try_run("sinfo", "-h", "-N", "-p", "normal", "-o", "%t")
        return done.stdout.split().count("idle") == self.nodes

    def _alive(self) -> None:
        for name, process in self._daemons.items():
            if process.poll() is not None:
                raise ClusterError(f"{name} ended with {process.returncode}\n{self.logs()}")

    def _until(self, condition: Any, what: str) -> None:
        until = time.monotonic() + _SETTLES_WITHIN
        while not condition():
            self._alive()
            if time.monotonic() > until:
                raise ClusterError(f"waited {_SETTLES_WITHIN:g} s until {what}\n{self.logs()}")
            time.sleep(0.1)


def why_unavailable() -> str | None:
    """Say why there can be no cluster here, or None when there can (found out by making one host)."""
    if os.geteuid() != 0:
        return "namespaces need root"
    try:
        install()
        with Hosts(1):
            return None
    except (ClusterError, HostsError) as error:
        return str(error)


def slurm_conf(base: Path, addresses: dict[str, str], *, cpus: int, gpus: int, user_signal: bool) -> str:
    """The configuration of the whole cluster.

    Args:
        base: Where everything of the cluster lies.
        addresses: Of the controller, then of the nodes, by name.
        cpus: Per node; may be more than there are.
        gpus: Per node.
        user_signal: Whether preemption sends a job's own ``--signal``.
    """
    controller, *nodes = addresses
    memory = 1000 * cpus
    settings = {
        "ClusterName": "tests",
        "SlurmctldHost": f"{controller}({addresses[controller]})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job waits until its credentials have expired: 5 s instead of 120 (less is refused).
        "AuthInfo": f"socket={base}/munge.sock,cred_expire=5",
        "CredType": "cred/munge",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SlurmctldPidFile": f"{base}/slurmctld.pid",
        "SlurmdPidFile": f"{base}/slurmd-%n.pid",
        "SlurmdSpoolDir": f"{base}/spool/%n",
        "StateSaveLocation": f"{base}/state",
        "SlurmctldLogFile": f"{base}/log/slurmctld.log",
        "SlurmdLogFile": f"{base}/log/slurmd-%n.log",
        "SwitchType": "switch/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": str(memory // cpus),
        "SlurmdParameters": "config_overrides",
        "SchedulerParameters": "sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0",
        "ReturnToService": "2",
        "JobRequeue": "1",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "KillWait": "15",
        "MinJobAge": "3600",
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": "20",
        "MailProg": "/bin/true",
    }
    if user_signal:
        settings["SlurmctldParameters"] = "preempt_send_user_signal"
    if gpus:
        settings["GresTypes"] = "gpu"
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={name} NodeAddr={addresses[name]} CPUs={cpus} RealMemory={memory}{gres} State=UNKNOWN"
        for name in nodes
    ]
    everywhere = f"Nodes={','.join(nodes)} MaxTime=60 DefaultTime=10 State=UP"
    lines += [
        f"PartitionName=normal {everywhere} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30",
        f"PartitionName=urgent {everywhere} Default=NO PriorityTier=100 PreemptMode=OFF",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    import sys

    if sys.argv[1:] != ["install"]:
        sys.exit("usage: python -m tests.slurm.cluster install")
    install()
