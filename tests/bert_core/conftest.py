"""A store that speaks S3's protocol on this machine, as much of it as pyarrow needs."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

DATE = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of an empty bucket; `s3://` leads there while the test runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler({}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    yield "s3://bucket"
    server.shutdown()
    server.server_close()


def _handler(objects: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    """A handler over `objects`, by their keys with the bucket in front."""
    uploads: dict[str, dict[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two packets: 40 ms apart otherwise

        def log_message(self, *_: object) -> None: ...

        @property
        def key(self) -> str:
            return unquote(urlsplit(self.path).path).removeprefix("/")

        @property
        def query(self) -> dict[str, str]:
            pairs = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
            return {name: values[0] for name, values in pairs.items()}

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            if self.key in objects:
                self.answer(200, objects[self.key], **DATE)
            else:
                self.answer(404 if "/" in self.key else 200)

        def do_GET(self) -> None:
            if "list-type" in self.query:
                self.answer(200, self.listing().encode(), **{"Content-Type": "application/xml"})
            elif self.key in objects:
                data = objects[self.key]
                first, last = re.findall(r"\d+", self.headers.get("Range", f"0-{len(data)}"))
                part = data[int(first) : int(last) + 1]
                span = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                self.answer(206, part, **DATE, **{"Content-Range": span})
            else:
                self.answer(404)

        def listing(self) -> str:
            bucket, prefix = self.key.rstrip("/"), self.query.get("prefix", "")
            delimiter = self.query.get("delimiter", "\0")
            entries = set()
            for key, data in objects.items():
                name = key.removeprefix(f"{bucket}/")
                folder, cut, _ = name[len(prefix) :].partition(delimiter)
                if name.startswith(prefix) and cut:
                    path = escape(prefix + folder + cut)
                    entries.add(f"<CommonPrefixes><Prefix>{path}</Prefix></CommonPrefixes>")
                elif name.startswith(prefix):
                    entries.add(
                        f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size>"
                        "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                    )
            return (
                f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(sorted(entries))}"
                f"<KeyCount>{len(entries)}</KeyCount></ListBucketResult>"
            )

        def do_PUT(self) -> None:
            data = self.body()
            if "partNumber" in self.query:
                uploads.setdefault(self.key, {})[int(self.query["partNumber"])] = data
            else:
                objects[self.key] = data
            self.answer(200, ETag='"tag"')

        def do_POST(self) -> None:
            body = self.body()
            if "uploads" in self.query:
                self.answer(200, _xml("InitiateMultipartUploadResult", "UploadId"))
            elif "uploadId" in self.query:
                parts = uploads.pop(self.key)
                objects[self.key] = b"".join(parts[number] for number in sorted(parts))
                self.answer(200, _xml("CompleteMultipartUploadResult", "ETag"))
            else:
                for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                    objects.pop(f"{self.key.rstrip('/')}/{name}", None)
                self.answer(200, b"<DeleteResult/>")

        def do_DELETE(self) -> None:
            objects.pop(self.key, None)
            self.answer(204)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

    return Handler


def _xml(outer: str, inner: str) -> bytes:
    return f"<{outer}><{inner}>1</{inner}></{outer}>".encode()
