"""The cache daemon: a pure store of images and leases, and the server that executes its actions."""
