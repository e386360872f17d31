"""The cache daemon: a pure store of images and leases, and the server that executes its actions.

The way of a load, and what takes part:

- ``main``, ``detached``: start and end of the process; ``server``: its loop, in one thread;
- ``connections``, ``control``, ``events``, ``sessions``, ``offers``: sockets, clients, their files;
- ``front``, ``requests``: how requests are answered; ``openings``, ``waiting``: those for images;
- ``store``, ``leases``, ``eviction``, ``recent``: decide; pure; ``values``: what goes in and out;
- ``tiers``: a store and a loader each, for the host and for each device (``device``);
- ``loader``, ``ingest``, ``workers``: the threads that read files;
- ``prepared``: models of onnxruntime, made by processes of ``preparer``.
"""
