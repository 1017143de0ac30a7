"""``shardrt bench link``: an emulated slow network that stays up until it is taken down."""

from __future__ import annotations

import click

from shardrt.errors import ConfigError


@click.group()
def link() -> None:
    """Two network namespaces with a slow link between them, for trying things out.

    Needs root and iproute2. `shardrt bench overlap --link` makes and removes one of its own.
    """


@link.command()
@click.option("--rate", default="1gbit", show_default=True, help="Such as 1gbit, 250mbit or 64kbit.")
def up(rate: str) -> None:
    """Bring it up."""
    from shardrt.bench.link import DEVICE, STANDING, EmulatedLink

    made = EmulatedLink(rate, name=STANDING)
    found = made.rate_found()
    if found is not None:
        told = f"the link is up already, at {_in_words(found)}"
        if found != made.bits_per_second:
            raise ConfigError(f"{told}; take it down first: shardrt bench link down")
        click.echo(told)
        return
    made.down()  # what a killed one left half way
    made.up()
    click.echo(f"up: {_in_words(made.bits_per_second)} each way between")
    for namespace, host in zip(made.namespaces, made.hosts, strict=True):
        click.echo(f"  {namespace}  {host.address}  device {DEVICE}")
    click.echo(
        f"run something in one: ip netns exec {made.namespaces[0]} env GLOO_SOCKET_IFNAME={DEVICE} torchrun "
        f"--nnodes 2 --node-rank 0 --master-addr {made.hosts[0].address} train.py"
    )


@link.command()
def down() -> None:
    """Take it down, if it is up."""
    from shardrt.bench.link import STANDING, EmulatedLink

    click.echo("down" if EmulatedLink(name=STANDING).down() else "it was not up")


@link.command()
def status() -> None:
    """Say whether it is up, and what other links there are."""
    from shardrt.bench.link import STANDING, EmulatedLink, namespaces_of_ours

    standing = EmulatedLink(name=STANDING)
    found, namespaces = standing.rate_found(), namespaces_of_ours()
    half = any(name in standing.namespaces for name in namespaces)
    if found is not None:
        click.echo(f"up: {_in_words(found)} each way between {' and '.join(standing.namespaces)}")
    else:
        click.echo("partly up: take it down first: shardrt bench link down" if half else "not up")
    for name in namespaces:
        if name not in standing.namespaces:
            click.echo(f"also there, of a benchmark under way or of one that was killed: {name} (ip netns del {name})")


def _in_words(bits: int) -> str:
    for size, unit in ((10**9, "gbit"), (10**6, "mbit"), (10**3, "kbit")):
        if bits % size == 0:
            return f"{bits // size}{unit}"
    return f"{bits} bit"
