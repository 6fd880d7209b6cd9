// The controls in which an input is typed.

import {html, useRef, useState} from "./vendor/htm-preact.js";

export function Field({field, value, onInput}) {
  const [isOpen, setOpen] = useState(false);
  const area = useRef();
  const id = `field-${field.name}`;
  if (field.isFlag) {
    return html`
      <label class="flag">
        <input type="checkbox" checked=${Boolean(value)}
          onChange=${event => onInput(event.target.checked)} /> ${field.label}
      </label>`;
  }
  if (field.isOptional && !value && !isOpen) {
    return html`
      <button type="button" class="quiet add" onClick=${() => setOpen(true)}>
        + ${field.label}
      </button>`;
  }
  function insert() {
    const {selectionStart: start, selectionEnd: end} = area.current;
    const text = value ?? "";
    onInput(text.slice(0, start) + field.insert + text.slice(end));
    area.current.focus();
  }
  return html`
    <div class="field">
      <div class="bar-of-section">
        <label for=${id}>${field.label}</label>
        ${field.isList && html`<span class="hint" id=${`${id}-hint`}>one per line</span>`}
        ${field.insert && html`
          <button type="button" class="quiet" onClick=${insert}>Insert ${field.insert}</button>`}
      </div>
      <textarea id=${id} ref=${area} dir="auto" rows=${field.rows} value=${value ?? ""}
        required=${!field.isOptional}
        aria-describedby=${field.isList ? `${id}-hint` : undefined}
        onInput=${event => onInput(event.target.value)}
        onKeyDown=${event => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            event.target.form.requestSubmit();
          }
        }}></textarea>
    </div>`;
}
