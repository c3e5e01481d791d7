// Requests to the server this page came from. The key lives in this tab only.

const KEY = "sglane-key";
const ANSWER_MS = 8000;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An error answer: status (0: nobody answered) and what the server says. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(extra) {
  return key.get() ? { ...extra, Authorization: `Bearer ${key.get()}` } : extra;
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers ?? {}), cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  throw new ApiError(response.status, await messageOf(response));
}

async function messageOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    if (typeof body.message === "string") return body.message;
  } catch {
    // not this server's error shape: something in between has answered
  }
  return `${response.status} ${response.statusText}`.trim();
}

/** GET, as JSON. */
export async function ask(path) {
  const response = await send(path, { signal: AbortSignal.timeout(ANSWER_MS) });
  return response.json();
}

/** POST with `stream: true`; yields the events before [DONE]. An error event is thrown. */
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, stream: true }),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "the connection broke");
    }
    if (part.done) throw new ApiError(0, "the connection broke before the answer was complete");
    const events = (pending + part.value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new ApiError(value.error.code ?? 0, value.error.message);
      yield value;
    }
  }
}
