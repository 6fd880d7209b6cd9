// The call that the page makes, for other programs: curl, Python and JavaScript. A key is read from
// the environment there, and never shown.

import {html, useState} from "./vendor/htm-preact.js";
import {addressOf, apiKey} from "./server.js";
import {requestOf, TASKS} from "./tasks.js";

const VARIABLE = "RAYBERT_API_KEY";

/** Language → source. */
export function callsOf(model, task, values, withKey) {
  const {python, openai} = TASKS[task];
  const {path, body} = requestOf(task, values);
  const url = addressOf(model.url + path);
  const method = values.cut ? null : python?.(values); // these methods do not know how to cut
  return {
    curl: curl(url, body, withKey),
    Python: method ? inferenceClient(addressOf(model.url), method, withKey)
      : httpx(url, body, withKey),
    ...openai && !values.cut ? {OpenAI: openaiClient(model, openai(values), withKey)} : {},
    JavaScript: javascript(url, body, withKey),
  };
}

const quoted = text => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(url, body, withKey) {
  const key = withKey ? ` \\\n  --header "Authorization: Bearer $${VARIABLE}"` : "";
  return `curl ${url} \\\n  --header 'Content-Type: application/json'${key} \\\n  --data ${
    quoted(JSON.stringify(body))}`;
}

/** A value as Python writes it. */
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(value);
    return `{${entries.map(([name, each]) => `${literal(name)}: ${literal(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

const keyword = values =>
  Object.entries(values).map(([name, value]) => `    ${name}=${literal(value)},\n`).join("");

function inferenceClient(url, [method, ...given], withKey) {
  const parts = given.map(each =>
    typeof each === "object" && !Array.isArray(each) ? keyword(each) : `    ${literal(each)},\n`);
  return `${withKey ? "import os\n\n" : ""}from huggingface_hub import InferenceClient

client = InferenceClient(${withKey ? `token=os.environ["${VARIABLE}"]` : ""})
answer = client.${method}(
${parts.join("")}    model=${literal(url)},
)
print(answer)
`;
}

function httpx(url, body, withKey) {
  const headers = withKey
    ? `headers = {"Authorization": f"Bearer {os.environ['${VARIABLE}']}"}\n` : "";
  return `${withKey ? "import os\n\n" : ""}import httpx

${headers}body = ${literal(body)}
answer = httpx.post(${literal(url)}, json=body${withKey ? ", headers=headers" : ""})
print(answer.raise_for_status().json())
`;
}

function openaiClient(model, texts, withKey) {
  const key = withKey ? `os.environ["${VARIABLE}"]` : `"none"`;
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(addressOf("/v1"))}, api_key=${key})
answer = client.embeddings.create(model=${literal(model.id)}, input=${literal(texts)})
print([each.embedding for each in answer.data])
`;
}

function javascript(url, body, withKey) {
  const key = withKey ? `\n    "Authorization": \`Bearer \${process.env.${VARIABLE}}\`,` : "";
  return `const response = await fetch(${JSON.stringify(url)}, {
  method: "POST",
  headers: {
    "Content-Type": "application/json",${key}
  },
  body: JSON.stringify(${JSON.stringify(body)}),
});
console.log(await response.json());
`;
}

export function Calls({model, task, values}) {
  const calls = callsOf(model, task, values, Boolean(apiKey()));
  const [language, setLanguage] = useState("curl");
  const shown = language in calls ? language : "curl";
  return html`
    <section class="card" aria-labelledby="calls">
      <div class="bar-of-section">
        <h2 id="calls">The same call from a program</h2>
        <div class="segments" role="group" aria-label="Language">
          ${Object.keys(calls).map(name => html`
            <button type="button" aria-pressed=${String(name === shown)}
              onClick=${() => setLanguage(name)}>${name}</button>`)}
        </div>
      </div>
      <pre class="code" tabindex="0" aria-label=${`The call in ${shown}`}>${calls[shown]}</pre>
      <${Copy} text=${calls[shown]} label="Copy the call" />
    </section>`;
}

/** A button that copies a text, and says that it has. */
export function Copy({text, label}) {
  const [told, setTold] = useState("");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      setTold("Copied");
    } catch { // browsers allow it on HTTPS and on this machine only
      setTold("This browser does not let the page copy: select the text instead");
    }
    setTimeout(() => setTold(""), 3000);
  }
  return html`
    <button type="button" onClick=${copy}>${label}</button>
    <span class="told" role="status">${told}</span>`;
}
