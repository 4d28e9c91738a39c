"""The command line of ``dtorch-launch``: options and help. What the commands do is in ``commands``."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from dtorch_launcher import commands
from dtorch_launcher.plan import EXIT_REFUSED, Program, with_default_command
from dtorch_runtime.errors import DTorchError


def _help(text: str) -> str:
    """Help as typer wants it: a paragraph is one line, so that it is wrapped to the terminal; examples stay lines."""
    paragraphs = [paragraph.strip("\n") for paragraph in inspect.cleandoc(text).split("\n\n")]
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split()) for p in paragraphs)


_OVERVIEW = _help(
    """
    Run a program on a cluster of this machine, or bring up a cluster of many.

    [bold]On one machine[/bold], everything at once; the cluster ends with the program:

      [cyan]dtorch-launch --nodes 2 --devices-per-node 2 train.py --epochs 3[/cyan]

    [bold]On several machines[/bold], make keys once and copy them:

      [cyan]dtorch-launch keys ./keys[/cyan]

    a controller on one of them, and an agent on each:

      [cyan]dtorch-launch controller --bind tcp://0.0.0.0:5555 --keys ./keys[/cyan]
      [cyan]dtorch-launch agent --connect tcp://head:5555 --devices 8 --keys ./keys[/cyan]

    and the program anywhere:

      [cyan]DTORCH_ADDRESS=tcp://head:5555 DTORCH_KEYS=./keys python train.py[/cyan]

    Exit status: the program's own (128 + n if signal n ended it); 2 if dtorch-launch could not do what was asked.
    """
)

app = typer.Typer(
    name="dtorch-launch",
    help=_OVERVIEW,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

Connect = Annotated[
    str,
    typer.Option(
        envvar="DTORCH_ADDRESS", metavar="ADDRESS", help="The controller's address, e.g. tcp://head:5555."
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        envvar="DTORCH_KEYS",
        metavar="FOLDER",
        help="Folder that `dtorch-launch keys` made. Not needed on one machine, where DTORCH_SESSION_KEY is enough.",
    ),
]
DeviceType = Annotated[
    str, typer.Option(metavar="cpu|cuda", help="CPU devices are virtual: any number is fine.")
]
Wait = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the controller.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"dtorch-launch {version('dtorch')}")
        raise typer.Exit


@app.callback()
def overview(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass  # --version acts in its callback; typer takes the group's options from this signature


@app.command(
    help=_help(
        """
    Run a program on a new cluster of this machine. The word `run` may be left out.

    Starts a controller and the agents, then the program, which finds the cluster by itself. The program has the
    terminal; the cluster's log goes to standard error, each line behind its node's name. SIGINT, SIGTERM and SIGHUP
    are passed on to the program. When it ends, the cluster ends, and its exit status is returned.

    [bold]Examples[/bold]

      [cyan]dtorch-launch train.py[/cyan]

      [cyan]dtorch-launch --nodes 2 --devices-per-node 2 train.py --epochs 3[/cyan]

      [cyan]dtorch-launch --nodes 2 -m my_package.train --epochs 3[/cyan]

      [cyan]dtorch-launch -- status[/cyan]   a script named like a subcommand
    """
    ),
    context_settings={"allow_interspersed_args": False},
)
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m, a module.")],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="The program's own, passed on as they are."),
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="Node agents to start.")] = 1,
    devices_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Devices of each. (default: 64 on one node, else its cores; with cuda, all GPUs shared out)",
        ),
    ] = None,
    device_type: DeviceType = "cpu",
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
) -> None:
    program = Program(target=target, args=tuple(args or ()), is_module=module)
    raise typer.Exit(commands.run_program(program, nodes, devices_per_node, device_type))


@app.command(
    help=_help(
        """
    Run the controller of a cluster in the foreground, until a signal or `dtorch-launch stop`.

    An address that other machines can reach needs keys. Without them, on this machine, the session key is that of
    DTORCH_SESSION_KEY, or a new one, which is printed.

    [bold]Examples[/bold]

      [cyan]dtorch-launch controller --bind tcp://0.0.0.0:5555 --keys ./keys[/cyan]

      [cyan]dtorch-launch controller --bind tcp://127.0.0.1:5555[/cyan]
    """
    )
)
def controller(
    bind: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Where to listen: tcp://0.0.0.0:5555, tcp://127.0.0.1:*, ipc:///path."
        ),
    ],
    keys: Keys = None,
) -> None:
    raise typer.Exit(commands.run_controller(bind, keys))


@app.command(
    help=_help(
        """
    Run a node agent in the foreground: it joins the controller and offers this machine's devices.

    [bold]Examples[/bold]

      [cyan]dtorch-launch agent --connect tcp://head:5555 --devices 8 --device-type cuda --keys ./keys[/cyan]

      [cyan]dtorch-launch agent --connect tcp://127.0.0.1:5555 --name a --devices 2[/cyan]
    """
    )
)
def agent(
    connect: Connect,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The node's name in logs and errors. (default: the host's)"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Devices to offer. (default: the number of cores; with cuda, all GPUs)"
        ),
    ] = None,
    device_type: DeviceType = "cpu",
    data_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where the other nodes reach this one. (default: its address towards the controller, any free port)",
        ),
    ] = None,
    keys: Keys = None,
) -> None:
    raise typer.Exit(commands.run_agent(connect, name, devices, device_type, data_address, keys))


@app.command(
    help=_help(
        """
    Show the nodes, devices and sessions of a cluster.

    [bold]Example[/bold]

      [cyan]dtorch-launch status --connect tcp://head:5555 --keys ./keys[/cyan]
    """
    )
)
def status(
    connect: Connect,
    keys: Keys = None,
    timeout_s: Wait = 5.0,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON, for programs.")] = False,
) -> None:
    commands.show_status(connect, keys, timeout_s, as_json=json)


@app.command(
    help=_help(
        """
    End a cluster: the controller and all of its agents. Programs that still run on it get an error.

    [bold]Example[/bold]

      [cyan]dtorch-launch stop --connect tcp://head:5555 --keys ./keys[/cyan]
    """
    )
)
def stop(connect: Connect, keys: Keys = None, timeout_s: Wait = 5.0) -> None:
    commands.stop(connect, keys, timeout_s)


@app.command(
    help=_help(
        """
    Make the keys of a cluster: server.json for the controller, client.json for agents and programs.

    Whoever has client.json can run programs on the cluster: copy it only to its machines, by scp for example.
    Keys are never overwritten.

    [bold]Example[/bold]

      [cyan]dtorch-launch keys ./keys && scp -r ./keys node1:[/cyan]
    """
    )
)
def keys(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Made if it is missing; only you can read it.")
    ],
) -> None:
    commands.make_keys(folder)


def main() -> None:
    """Run ``dtorch-launch`` with the arguments of this process, and exit."""
    try:
        app(with_default_command(sys.argv[1:]))
    except DTorchError as error:
        print(f"dtorch-launch: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
