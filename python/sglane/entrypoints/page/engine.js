// What the server says of itself: figures, pages of every lane, throughput. Asks once a second while the page can be seen.

import { ApiError, ask } from "./api.js";
import { Chart } from "./chart.js";

const EVERY_MS = 1000;
const SLOWEST_MS = 5000;
const WINDOW = 120; // samples of the charts
const KINDS = ["held", "cached", "tickets", "free"];
const WORDS = { held: "held", cached: "cached", tickets: "free soon", free: "free" };

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const rate = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

function say(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  return `${rate.format(count / 2 ** (10 * power))} ${units[power]}`;
}

/** One bar per lane. `lanes`: kind -> pages by lane. */
class Lanes {
  constructor(holder) {
    this.holder = holder;
    this.rows = [];
  }

  draw(lanes) {
    while (this.rows.length > lanes.total.length) this.rows.pop().row.remove();
    while (this.rows.length < lanes.total.length) this.rows.push(this.makeRow(this.rows.length));
    this.rows.forEach((row, lane) => this.drawRow(row, lane, lanes));
  }

  makeRow(lane) {
    const row = document.createElement("div");
    row.className = "lane";
    const [name, bars, amount] = ["span", "div", "span"].map((tag) => document.createElement(tag));
    name.className = "name";
    name.textContent = `Lane ${lane}`;
    bars.className = "bars";
    bars.setAttribute("role", "img");
    amount.className = "amount";
    const parts = Object.fromEntries(KINDS.map((kind) => {
      const part = document.createElement("span");
      part.dataset.kind = kind;
      bars.append(part);
      return [kind, part];
    }));
    row.append(name, bars, amount);
    this.holder.append(row);
    return { row, bars, amount, parts };
  }

  drawRow({ bars, amount, parts }, lane, lanes) {
    const total = lanes.total[lane];
    for (const kind of KINDS) {
      const pages = lanes[kind][lane];
      parts[kind].dataset.pages = pages;
      parts[kind].style.width = `${total ? (100 * pages) / total : 0}%`;
      parts[kind].title = `${whole.format(pages)} ${WORDS[kind]}`;
    }
    bars.setAttribute("aria-label", `Lane ${lane}: ${KINDS.map((kind) => `${lanes[kind][lane]} ${WORDS[kind]}`).join(", ")}; ${total} pages`);
    amount.textContent = `${whole.format(total - lanes.free[lane])} / ${whole.format(total)} pages`;
  }
}

/** Rates from the differences of totals. */
class Rates {
  constructor() {
    this.last = null;
    this.samples = [];
  }

  /** False when the totals went back: another server answers now. */
  add(timestamp, totals) {
    const last = this.last;
    this.last = { timestamp, totals };
    if (!last) return true;
    const seconds = timestamp - last.timestamp;
    const [prompt, cached, output] = ["prompt_tokens", "cached_tokens", "output_tokens"].map((name) => totals[name] - last.totals[name]);
    if (seconds <= 0 || prompt < 0 || cached < 0 || output < 0) {
      this.samples = [];
      return false;
    }
    this.samples.push({ prompt, cached, output, seconds });
    this.samples = this.samples.slice(-WINDOW);
    return true;
  }

  perSecond(name) {
    return this.samples.map((sample) => sample[name] / sample.seconds);
  }

  hitRate() {
    const sum = (name) => this.samples.reduce((total, sample) => total + sample[name], 0);
    const asked = sum("prompt") + sum("cached");
    return asked ? sum("cached") / asked : null;
  }
}

/** planes: [name, layers, width, bytes per element]. */
function kvBits(planes) {
  return [...new Set(planes.map((plane) => 8 * plane[3]))].join(" and ");
}

function factsOf(info) {
  const state = info.internal_states[0];
  const memory = state.memory_usage;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const role = info.disaggregation_mode === "null" ? "unified" : info.disaggregation_mode;
  const fallbacks = Object.entries(state.kv_ledger.fallbacks).filter(([, count]) => count).map(([name, count]) => `${name} ${count}`);
  return [
    ["Model", info.served_model_name],
    ["Version", info.version],
    ["Type", `${info.dtype === "auto" ? "as stored" : info.dtype}, KV in ${kvBits(memory.planes)} bit`],
    ["Device", [...new Set(memory.devices)].join(", ")],
    ["Role", role],
    ["Ranks (lanes)", whole.format(info.cp_size)],
    ["Context", `${whole.format(info.context_length)} tokens`],
    ["Page", `${whole.format(info.page_size)} tokens`],
    ["KV pool", `${whole.format(info.max_total_num_tokens)} tokens`],
    ["Weights", bytes(sum(memory.weight_bytes))],
    ["KV memory", bytes(sum(memory.kvcache_bytes))],
    ["Planes", memory.planes.map(([name]) => name).join(", ")],
    ["Slower paths taken", fallbacks.join(", ") || "none"],
    ...(state.speculation ? [["Drafts per step", whole.format(state.speculation.max_drafts)]] : []),
    ["Path", info.model_path],
  ];
}

export class Engine {
  /** onState(state, message): live, starting, unreachable, locked. */
  constructor(onState) {
    this.onState = onState;
    this.lanes = new Lanes(byId("lanes"));
    this.hostLanes = new Lanes(byId("host-lanes"));
    this.charts = { output: new Chart(byId("output-chart"), WINDOW), prompt: new Chart(byId("prompt-chart"), WINDOW) };
    this.rates = new Rates();
    this.hasInfo = false;
    this.waitMs = EVERY_MS;
    this.timer = 0;
    this.turn = 0;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Ask now, and go on from there. */
  wake() {
    clearTimeout(this.timer);
    this.turn += 1;
    if (!document.hidden) this.look(this.turn);
  }

  async look(turn) {
    try {
      const answer = await ask("/v1/loads?include=core,memory,totals");
      if (turn !== this.turn) return;
      if (!this.rates.add(answer.timestamp, answer.loads[0].totals)) this.hasInfo = false;
      if (!this.hasInfo) await this.readInfo();
      this.draw(answer.loads[0]);
      this.waitMs = EVERY_MS;
      this.onState("live", "");
    } catch (error) {
      if (turn !== this.turn) return;
      this.fail(error);
    }
    this.timer = setTimeout(() => this.look(turn), this.waitMs);
  }

  fail(error) {
    this.hasInfo = false;
    this.waitMs = Math.min(SLOWEST_MS, this.waitMs * 1.5);
    const isTimeout = error.name === "TimeoutError" || !(error instanceof ApiError);
    const status = isTimeout ? 0 : error.status;
    const state = status === 401 ? "locked" : status === 503 ? "starting" : "unreachable";
    this.onState(state, isTimeout && !(error instanceof ApiError) ? `no usable answer: ${error.message}` : error.message);
  }

  async readInfo() {
    const info = await ask("/server_info");
    byId("facts").replaceChildren(...factsOf(info).map(([name, value]) => {
      const [pair, term, text] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      term.textContent = name;
      text.textContent = value;
      pair.append(term, text);
      return pair;
    }));
    say("model", info.served_model_name);
    document.title = `${info.served_model_name} – sglane`;
    byId("metrics-link").hidden = !info.enable_metrics;
    for (const link of document.querySelectorAll("a[data-open]")) link.hidden = info.api_key !== null; // a link cannot carry a key
    this.hasInfo = true;
  }

  draw(load) {
    const pageTokens = load.memory.page_size;
    say("running", whole.format(load.num_running_reqs));
    say("slots", `of ${whole.format(load.max_running_requests)} at once`);
    say("waiting", whole.format(load.num_waiting_reqs));
    say("waiting-tokens", load.num_waiting_reqs ? `${short.format(load.num_waiting_uncached_tokens)} prompt tokens` : "nobody waits");
    say("usage", percent.format(load.token_usage));
    const cached = load.memory.lanes.cached.reduce((total, pages) => total + pages, 0) * pageTokens;
    say("usage-tokens", `${short.format(cached)} tokens cached`);
    say("hit-rate", percent.format(load.cache_hit_rate));
    const recent = this.rates.hitRate();
    say("recent-hit-rate", recent === null ? "since the start" : `${percent.format(recent)} lately`);
    for (const name of ["output", "prompt"]) {
      const values = this.rates.perSecond(name);
      say(`${name}-rate`, rate.format(values.at(-1) ?? 0));
      this.charts[name].draw(values);
    }
    this.lanes.draw(load.memory.lanes);
    const host = load.memory.host_lanes;
    byId("host-title").hidden = byId("host-lanes").hidden = !host.total.some((pages) => pages > 0);
    if (!byId("host-lanes").hidden) this.hostLanes.draw(host);
  }
}
