"""Ctrl-C ends a process that imports this at once and without a word: what a fork server of workers imports first."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
