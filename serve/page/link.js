// The address of the page holds what is asked, so that it can be sent to others.

/** {model, task, other, values}, or null if the address holds nothing. */
export function read() {
  const held = new URLSearchParams(location.hash.slice(1));
  if (!held.has("model")) return null;
  let values = {};
  try {
    values = JSON.parse(held.get("input") ?? "{}");
  } catch {
    values = {}; // a link that was cut on its way
  }
  return {
    model: held.get("model"), task: held.get("task"), other: held.get("with") ?? "",
    values: values !== null && typeof values === "object" ? values : {},
    hasInput: held.has("input"),
  };
}

export function write({model, task, other, values}) {
  const held = new URLSearchParams({model, task});
  if (other) held.set("with", other);
  held.set("input", JSON.stringify(values));
  history.replaceState(null, "", `#${held}`);
}
