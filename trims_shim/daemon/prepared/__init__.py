"""Prepared ONNX models in the daemon: which exist, who leases them, and how more are made.

The way of a request, and what takes part:

- ``serving``: takes requests, in the server's thread, and executes what the store decides;
- ``clients``: what clients offer and are told; ``interpreters``: the Python that one runs in;
- ``store``, ``refusals``: decide; pure; ``values``: what goes in and out of them;
- ``key``: of a prepared model; ``externals``: the files of a model's external data;
- ``jobs``: the thread that has models prepared; ``preparing``: starts its processes
  (:mod:`trims_shim.daemon.preparer`) and talks to them;
- ``files``: what is in the directory; ``manifest``: the records there; ``directory``: where it is,
  and whether it can be used.
"""
