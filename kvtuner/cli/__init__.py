"""The ``kvtuner`` command. Imports nothing heavy until a sub-command needs it."""

from __future__ import annotations

import errno
import io
import select
import signal
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.cli.command import Command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: done. 1: done, and `doctor`, `validate`, `diff --exit-code` or `bench` found something. 2: a clear refusal, the
    last line on stderr. 130: interrupted. 141: ended early, since nobody reads what is printed, as after ``| head``.
    """
    from kvtuner.cli.parser import COMMANDS, build_parser, parse

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, io.StringIO())
    parser = build_parser()
    args = parse(parser, list(sys.argv[1:] if argv is None else argv))
    if args.command is None:
        parser.print_help()
        return 0
    return _run(COMMANDS[args.command], args)


def _run(command: Command, args: Namespace) -> int:
    from kvtuner.errors import KVTunerError

    sys.unraisablehook = _unraisable
    try:
        status = command.run(args)
        sys.stdout.flush()
        return status
    except KVTunerError as error:
        if args.debug:
            raise
        print(f"kvtuner {command.name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if args.debug:
            raise
        again = "; run the same command again to resume" if command.resumes else ""
        print(f"\nkvtuner {command.name}: interrupted{again}", file=sys.stderr)
        # Python remembers an interrupt that hit text being executed, such as a dataclass's, until other text is; under
        # `python -m` it would end by the signal in place of the status.
        exec("")
        return 130
    except BrokenPipeError:
        unread = [name for name in ("stdout", "stderr") if _is_unread(getattr(sys, name))]
        if not unread:  # the pipe of a worker, or a connection
            raise
        for name in unread:
            setattr(sys, name, io.StringIO())  # what is left of the old one would be written at the end
        return 128 + signal.SIGPIPE
    except OSError as error:
        if args.debug or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"kvtuner {command.name}: error: no space left for what is written ({error.strerror})", file=sys.stderr)
        sys.stdout = io.StringIO()  # what is left of the old one would be written at the end
        return 2


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe or a connection whose reader is gone."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # in memory, or closed
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    """Ctrl-C that hit a finalizer would be printed and lost: raise it again where it counts."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    else:
        sys.__unraisablehook__(problem)
