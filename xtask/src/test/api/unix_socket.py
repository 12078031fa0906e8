"""Hooks of schemathesis: connects each request to the Unix socket that REAPER_SOCKET names."""

import os
import socket

from urllib3.util import connection


def connect(*_address, **_options):
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(os.environ["REAPER_SOCKET"])
    return stream


connection.create_connection = connect
