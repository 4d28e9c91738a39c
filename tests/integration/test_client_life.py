"""Beginning and end of a client: lazy imports, implicit clusters, exits, signals, forks; each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

#: A program that hangs shows where.
PRELUDE = "import faulthandler, os, sys, time; faulthandler.dump_traceback_later(50, exit=True)\n"


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def output_of(program: str, **environment: str) -> str:
    done = run(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_lazy() -> None:
    program = """
import dtorch
dtorch.DeviceMesh("cpu", [0]), dtorch.Shard(0), dtorch.PlacementError, dtorch.Settings, dtorch.init, dtorch.connect
from dtorch import rand, zeros
print("torch" in sys.modules, dtorch.cluster._ahead)
"""
    assert output_of(program) == "False None"


@pytest.mark.parametrize("imports", ["import dtorch, torch", "import dtorch.graph, torch"])
def test_the_device_is_known_in_any_order_of_imports(imports: str) -> None:
    assert output_of(f"{imports}\nprint(torch.device('dtorch'))") == "dtorch"


def test_shutdown_tells_of_errors_and_init_starts_again() -> None:
    program = """
import dtorch
dtorch.init(devices_per_node=2)
try: dtorch.init()
except dtorch.SettingError as error: print("runs already" in str(error))
x = dtorch.ones(2)
print(x.device_mesh.devices)
y = x[dtorch.tensor([7])]
try: dtorch.shutdown()
except dtorch.RemoteOpError as error: print(error.failure.error_type)
dtorch.shutdown()
try: x.to_torch()
except dtorch.SessionClosed: print("closed")
with dtorch.connect(num_nodes=2, devices_per_node=1) as cluster:
    print(cluster.devices, dtorch.ones(2).tolist())
    print(dtorch.ones(4, placements=[dtorch.Shard(0)]).redistribute(placements=[dtorch.Replicate()]).tolist())
"""
    assert output_of(program).splitlines() == [
        "True",
        "(0, 1)",
        "IndexError",
        "closed",
        "[0, 1] [1.0, 1.0]",
        "[1.0, 1.0, 1.0, 1.0]",
    ]


def test_the_first_op_starts_a_cluster_and_the_exit_tells_of_errors_and_leaves_nothing() -> None:
    program = """
import dtorch
x = dtorch.rand(4, 3, device_mesh=dtorch.DeviceMesh("cpu", [0, 5]), placements=[dtorch.Shard(0)])
assert (x + x).to_torch().shape == (4, 3)
y = dtorch.ones(3)[dtorch.tensor([7])]
print(*dtorch.cluster._stack[-1].local.pids.values())
"""
    done = run(program)
    assert done.returncode == 0
    assert "an error that nobody fetched: RemoteOpError: aten::index.Tensor failed" in done.stderr
    assert "<string>:6 in <module>" in done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("wait", ["x.to_torch()", "asyncio.run(wait())"])
def test_ctrl_c_ends_a_script_at_once(wait: str) -> None:
    program = f"""{PRELUDE}
import asyncio, dtorch
x = dtorch.rand(1500, 1500)
async def wait(): await x.value()
(x + 1).to_torch()
for _ in range(1000): x = (x @ x).clamp(0, 1)
print("waiting", *dtorch.cluster._stack[-1].local.pids.values(), flush=True)
{wait}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    word, *pids = process.stdout.readline().split()
    assert word == "waiting"
    process.send_signal(signal.SIGINT)
    started_s = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert not [pid for pid in map(int, pids) if psutil.pid_exists(pid)]
    assert time.monotonic() - started_s < 10


def test_a_forked_child_is_told_so() -> None:
    program = """
import dtorch, torch
x = dtorch.ones(3)
x.to_torch()
faulthandler.cancel_dump_traceback_later()  # its thread is not in the child, which would wait for it at exit
child = os.fork()
if child == 0:
    for use in (lambda: x + 1, x.to_torch, lambda: dtorch.ones(2), dtorch.init, lambda: x.graph.sync()):
        try: use(); os._exit(1)
        except dtorch.ForkError as error: assert "spawn" in str(error)
    sys.exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), (x + 1).tolist())
"""
    assert output_of(program) == "0 [2.0, 2.0, 2.0]"


def test_a_lost_controller_is_told_to_every_use() -> None:
    program = """
import dtorch, signal
x = dtorch.ones(3)
x.to_torch()
future = x.value(); future.get()
[pid] = dtorch.cluster._stack[-1].local.pids.values()
y = x + 1
os.kill(pid, signal.SIGKILL)
for use in (y.to_torch, lambda: dtorch.ones(2), lambda: x + 1):
    try: print(use())
    except dtorch.ControllerLost as error: print("was ended by signal 9" in str(error))
dtorch.init()
print(dtorch.ones(2).tolist())
"""
    assert output_of(program).splitlines() == ["True", "True", "True", "[1.0, 1.0]"]
