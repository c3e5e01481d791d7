// Wires the parts of the page together: state of the server, key, chat.

import { key } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";

const byId = (id) => document.getElementById(id);
const STATES = { connecting: "connecting", live: "live", starting: "not ready", unreachable: "reconnecting", locked: "key needed" };

const dialog = byId("key-dialog");
let isLocked = false;

function showState(state, message) {
  const pill = byId("state");
  if (pill.dataset.state !== state) {
    pill.dataset.state = state;
    pill.textContent = STATES[state];
  }
  document.querySelector("main").classList.toggle("stale", state !== "live");
  const notice = byId("notice");
  const text = state === "live" ? "" : state === "locked" ? lockedText(message) : message;
  notice.hidden = !text;
  if (notice.textContent !== text) notice.textContent = text;
  if (state === "locked") byId("key-button").hidden = false;
  if (state === "live" && dialog.open && isLocked) dialog.close();
  if (state === "locked" && !isLocked) askForKey();
  isLocked = state === "locked";
}

function lockedText(message) {
  return key.get() ? `The key was refused: ${message}` : "This server needs a key to show figures and to chat.";
}

function askForKey() {
  const error = byId("key-error");
  error.hidden = !key.get();
  error.textContent = key.get() ? "This key was refused." : "";
  if (!dialog.open) dialog.showModal();
  byId("key").focus();
}

const engine = new Engine(showState);
new Chat((message) => {
  showState("locked", message);
});

byId("key-button").hidden = !key.get();
byId("key-button").addEventListener("click", () => {
  byId("key-error").hidden = true;
  dialog.showModal();
});
byId("key-cancel").addEventListener("click", () => dialog.close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  dialog.close();
  isLocked = false;
  engine.wake();
});

engine.wake();
