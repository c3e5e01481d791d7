// A conversation with the model. Everything that the model writes goes into text nodes, never into markup.

import { stream } from "./api.js";

const byId = (id) => document.getElementById(id);
const CLOSE_TO_END_PX = 60;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** One message on the page; text is appended as it comes. */
class Bubble {
  constructor(log, role, text) {
    this.log = log;
    this.item = make("li", `message ${role}`);
    this.item.append(make("span", "hidden", role === "user" ? "You: " : "Model: "));
    this.body = make("div", "text");
    this.text = document.createTextNode(text);
    this.body.append(this.text);
    this.item.append(this.body);
    log.append(this.item);
    this.scroll(true);
  }

  add(text) {
    this.keepAtEnd(() => this.text.appendData(text));
  }

  addThought(text) {
    this.keepAtEnd(() => {
      if (!this.thoughts) {
        const details = make("details");
        details.append(make("summary", "", "Thoughts"));
        const holder = make("div");
        this.thoughts = document.createTextNode("");
        holder.append(this.thoughts);
        details.append(holder);
        this.body.before(details);
      }
      this.thoughts.appendData(text);
    });
  }

  about(text) {
    this.keepAtEnd(() => this.item.append(make("p", "about", text)));
  }

  fail(text) {
    const error = make("p", "error", text);
    error.setAttribute("role", "alert");
    this.keepAtEnd(() => this.item.append(error));
    if (!this.text.data) this.body.hidden = true;
  }

  busy(is) {
    this.item.classList.toggle("busy", is);
    this.item.setAttribute("aria-busy", String(is));
  }

  keepAtEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const follows = scrollHeight - scrollTop - clientHeight < CLOSE_TO_END_PX;
    change();
    this.scroll(follows);
  }

  scroll(wanted) {
    if (wanted) this.log.scrollTop = this.log.scrollHeight;
  }
}

/** Figures under an answer. cached: null when the answer did not get as far as telling. */
function summary(usage, cached, seconds, reason) {
  const parts = [];
  if (usage) {
    const share = usage.prompt_tokens ? Math.round((100 * cached) / usage.prompt_tokens) : 0;
    parts.push(`${usage.prompt_tokens} prompt tokens${cached === null ? "" : `, ${cached} cached (${share} %)`}`);
    parts.push(`${usage.completion_tokens} new`);
    if (seconds > 0) parts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
  }
  if (reason === "length") parts.push("cut at max tokens");
  if (reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

export class Chat {
  /** onLocked(message): the server refused the key. */
  constructor(onLocked) {
    this.onLocked = onLocked;
    this.messages = [];
    this.abort = null;
    this.log = byId("log");
    this.question = byId("question");
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.question.focus();
  }

  /** Numbers of the settings; an empty field leaves the choice to the server. */
  settings() {
    const number = (id) => (byId(id).value.trim() === "" ? undefined : Number(byId(id).value));
    return { temperature: number("temperature"), max_tokens: number("max-tokens") };
  }

  async send() {
    const text = this.question.value.trim();
    if (!text || this.abort) return;
    this.question.value = "";
    const asked = { role: "user", content: text };
    const messages = [...this.messages, asked];
    new Bubble(this.log, "user", text);
    const bubble = new Bubble(this.log, "assistant", "");
    this.begin(bubble);
    const conversation = this.messages;
    const answer = await this.read(messages, bubble);
    this.end(bubble);
    if (conversation !== this.messages) return; // a new chat was begun meanwhile
    if (answer) this.messages = [...messages, { role: "assistant", content: answer }];
    else if (!this.question.value) this.question.value = text; // it was not answered: to be sent again
  }

  begin(bubble) {
    this.abort = new AbortController();
    bubble.busy(true);
    byId("stop").hidden = false;
    byId("send").hidden = true;
  }

  end(bubble) {
    this.abort = null;
    bubble.busy(false);
    byId("stop").hidden = true;
    byId("send").hidden = false;
  }

  /** Returns the text of the answer, also of one that was stopped or broke off. */
  async read(messages, bubble) {
    const body = {
      model: "default", messages, ...this.settings(), stream_options: { include_usage: true, continuous_usage_stats: true }, return_cached_tokens_details: true,
    };
    let [answer, usage, cached, reason, firstMs] = ["", null, null, "", 0];
    try {
      for await (const event of stream("/v1/chat/completions", body, this.abort.signal)) {
        usage = event.usage ?? usage;
        const details = event.sglext?.cached_tokens_details;
        if (details) cached = details.device + details.host;
        for (const { delta, finish_reason: finish } of event.choices) {
          firstMs ||= performance.now();
          if (delta.reasoning_content) bubble.addThought(delta.reasoning_content);
          if (delta.content) {
            answer += delta.content;
            bubble.add(delta.content);
          }
          reason = finish ?? reason;
        }
      }
      if (reason === "abort") bubble.fail("the answer was aborted");
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else {
        bubble.fail(error.message);
        if (error.status === 401) this.onLocked(error.message);
      }
    }
    const about = summary(usage, cached, firstMs ? (performance.now() - firstMs) / 1000 : 0, reason);
    if (about) bubble.about(about);
    return answer;
  }
}
