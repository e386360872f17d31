"""In the place of FastAPI where it is not installed: as much of it as the example takes.

Coroutines are awaited on the loop, functions run in threads, arguments are numbers of the query,
answers are JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

__all__ = ["FastAPI", "HTTPException"]


class HTTPException(Exception):
    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(status_code, detail)
        self.status_code = status_code
        self.detail = detail


class FastAPI:
    def __init__(self) -> None:
        self._routes: dict[str, Callable[..., Any]] = {}

    def get(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self._routes[path] = function
            return function

        return add

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        function = self._routes[scope["path"]]
        query = parse_qs(scope["query_string"].decode())
        arguments = {name: float(values[0]) for name, values in query.items()}
        status = 200
        try:
            if inspect.iscoroutinefunction(function):
                body = await function(**arguments)
            else:
                body = await asyncio.to_thread(function, **arguments)
        except HTTPException as error:
            status, body = error.status_code, {"detail": error.detail}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})
