#!/usr/bin/env bash
# huggingface_hub's `InferenceClient.feature_extraction` takes `encoding_format="base64"`, sends it,
# and then makes numbers of the texts that it has asked for: the call cannot succeed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check huggingface_hub==2.4.0 numpy

cat > ask.py <<'PYTHON'
import base64, http.server, json, struct, sys, threading
import huggingface_hub

VECTOR = [0.5, -1.0]

class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_base64 = "base64" in json.dumps(asked)
        packed = base64.b64encode(struct.pack("<2f", *VECTOR)).decode()
        body = json.dumps([packed if is_base64 else VECTOR]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = huggingface_hub.InferenceClient(provider="hf-inference")
url = f"http://127.0.0.1:{server.server_port}"
outcomes = {}
for form in ("float", "base64"):
    try:
        outcomes[form] = client.feature_extraction("a", model=url, encoding_format=form).tolist()
    except ValueError as error:
        outcomes[form] = f"ValueError: {error}"
    print(f"huggingface_hub {huggingface_hub.__version__}, {form}: {outcomes[form]}")
server.shutdown()
sys.exit(outcomes["float"] != [VECTOR] or "could not convert" not in str(outcomes["base64"]))
PYTHON
venv/bin/python ask.py
