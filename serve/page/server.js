// Requests to the server that this page comes from, and the API key that they carry.

const KEY = "raybert-api-key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** What the server refused, or could not do, in its own words. */
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The address of a path of the server, wherever a proxy has put this page. */
export const addressOf = path => new URL(path.replace(/^\//, ""), document.baseURI.split("#")[0]).href;

/**
 * Ask the server; a body makes it a POST.
 * Returns the answer, what it took, and what was read of the texts. Throws a Refusal.
 */
export async function ask(path, body, signal) {
  const headers = apiKey() ? {Authorization: `Bearer ${apiKey()}`} : {};
  const options = {headers, signal};
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const began = performance.now();
  let response, text;
  try {
    response = await fetch(addressOf(path), options);
    text = await response.text();
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refusal(
      `${location.origin} does not answer: see whether the server still runs, then try again.`);
  }
  const totalMs = performance.now() - began;
  const content = parsed(text);
  if (!response.ok) {
    const told = content?.error?.message ?? content?.error;
    throw new Refusal(told ?? `The server answered ${response.status}: try again.`, response.status);
  }
  return {
    content,
    totalMs,
    stages: stagesIn(response.headers.get("Server-Timing") ?? ""),
    tokens: response.headers.get("X-Tokens"),
    version: response.headers.get("X-Model-Version"),
    isKept: response.headers.get("X-Cache") === "hit",
    promptBytes: Number(response.headers.get("X-Prompt-Bytes") ?? 0),
    cuts: cutsIn(response.headers.get("X-Cut-Inputs") ?? ""),
  };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** `tokenize;dur=0.31, queue;dur=0.05` → [["tokenize", 0.31], ["queue", 0.05]] */
const stagesIn = header =>
  [...header.matchAll(/([\w.-]+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]);

/** `0@512,3.text_pair@498-` → [{place: "0.text", at: 512, isStart: false}, …] */
const cutsIn = header =>
  [...header.matchAll(/(\d+)(?:\.([^@,]+))?@(\d+)(-?)/g)].map(([, index, part, at, start]) =>
    ({place: `${index}.${part ?? "text"}`, at: Number(at), isStart: start === "-"}));
