"""Local copies of models in object stores and on web servers; see :mod:`.fetching`."""
