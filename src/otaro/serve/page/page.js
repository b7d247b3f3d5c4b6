// The page: a chat whose precision is a slider, and two answers side by side.
// Whatever a model writes goes into the page as text, never as HTML.

import { write, Writer } from "./answer.js";
import { api } from "./api.js";
import { Speed } from "./speed.js";
import { compare } from "./words.js";

const $ = (id) => document.getElementById(id);
const name = (bits) => `E5M${bits}`;
const bitsOf = (width) => Number(width.slice(-1));

const state = {
  model: undefined, // until the server has said it; a request without it is one to the only model
  widths: {}, // bits per weight by precision
  messages: [], // {role, content, parts: [[width, text]]}
  running: null, // {controller, id}
};
const speed = new Speed($("speed"), $("graph"));

// ---- what the server says

async function refresh() {
  try {
    const [health, precision] = await Promise.all([api("GET", "/health"), api("GET", "/v1/precision")]);
    showHealth(health);
    showPrecision(precision);
    if (!state.model) state.model = (await api("GET", "/v1/models")).data[0].id;
    $("model").textContent = state.model;
  } catch (error) {
    $("health").textContent = error.status === 401 ? "needs an API key" : "not reachable";
    $("health").dataset.status = "bad";
    if (error.status === 401) $("settings").open = true;
  }
}

function showHealth(health) {
  const words = {
    ok: "ready",
    loading: `ready at ${health.resident}, ${health.loading} is coming`,
    degraded: `ready at ${health.resident}; wider planes could not be read`,
    stopping: "stopping",
  };
  $("health").textContent = words[health.status] ?? health.status;
  $("health").dataset.status = health.status;
}

function showPrecision(precision) {
  state.widths = Object.fromEntries(precision.available.map((entry) => [entry.precision, entry.bits_per_weight]));
  const all = precision.available.map((entry) => bitsOf(entry.precision));
  const reachable = all.filter((bits) => bits <= bitsOf(precision.limit));
  const slider = $("width");
  slider.min = Math.min(...all);
  if (Number(slider.max) !== Math.max(...reachable)) {
    slider.max = Math.max(...reachable);
    const [first, , , last] = document.querySelectorAll(".ticks span");
    first.textContent = name(slider.min);
    last.textContent = name(slider.max);
  }
  if (!slider.dataset.set) {
    slider.dataset.set = "yes";
    const kept = Number(sessionStorage.getItem("width"));
    slider.value = kept || bitsOf(precision.width);
    $("auto").checked = sessionStorage.getItem("auto") ? sessionStorage.getItem("auto") === "yes" : precision.precision === "auto";
  }
  for (const [id, chosen] of [["resident", precision.limit], ["width-left", name(Math.max(...reachable))], ["width-right", name(Math.min(...all))]]) {
    fill($(id), id === "resident" ? all : reachable, chosen, id === "resident");
  }
  const memory = precision.memory.weights + precision.memory.cache + precision.memory.work;
  $("memory").textContent = size(memory);
  showWidth();
}

function fill(select, bits, chosen, always) {
  const wanted = bits.map(name).join();
  if (select.dataset.options !== wanted) {
    const before = select.value;
    select.replaceChildren(...bits.map((entry) => new Option(name(entry), name(entry))));
    select.dataset.options = wanted;
    select.value = bits.map(name).includes(before) ? before : chosen;
  } else if (always && document.activeElement !== select) {
    select.value = chosen;
  }
}

function size(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${Math.round(bytes / 1e6)} MB`;
}

// ---- precision

function showWidth(written = null) {
  const width = written ?? name($("width").value);
  $("shown").textContent = width;
  for (const element of [$("shown"), $("slider")]) element.dataset.width = width;
  $("width").setAttribute("aria-valuetext", width);
  $("width").disabled = $("auto").checked;
  $("bits").textContent = state.widths[width]?.toFixed(2) ?? "–";
}

function chosenPrecision() {
  if (!$("width").dataset.set) return undefined; // what the server takes by itself
  return $("auto").checked ? "auto" : name($("width").value);
}

let changing = Promise.resolve();

function changeWidth() {
  sessionStorage.setItem("width", $("width").value);
  sessionStorage.setItem("auto", $("auto").checked ? "yes" : "no");
  showWidth();
  const id = state.running?.id;
  if (!id) return;
  const precision = chosenPrecision();
  // One after another, so that the last one counts; an answer that has ended meanwhile does not mind.
  changing = changing.then(() => api("PUT", `/v1/precision/${id}`, { precision })).catch(() => {});
}

$("width").addEventListener("input", changeWidth);
$("auto").addEventListener("change", changeWidth);
$("resident").addEventListener("change", async () => {
  try {
    showPrecision(await api("PUT", "/v1/precision", { resident: $("resident").value }));
    announce(`Weights are in memory up to ${$("resident").value}`);
  } catch (error) {
    complain(error.message);
  }
});

// ---- chat

function render() {
  $("welcome").hidden = state.messages.length > 0;
  $("log").replaceChildren(...state.messages.map(bubble));
}

function bubble(message) {
  const item = document.createElement("li");
  item.className = `message ${message.role}`;
  const who = document.createElement("span");
  who.className = "unseen";
  who.textContent = message.role === "user" ? "You: " : "Model: ";
  const text = document.createElement("div");
  text.className = "text";
  item.append(who, text);
  const writer = new Writer(text);
  for (const [width, piece] of message.parts ?? [[null, message.content]]) writer.push(piece, width);
  item.writer = writer;
  if (message.note) item.append(footnote(message.note));
  return item;
}

function footnote(text) {
  const element = document.createElement("p");
  element.className = "note";
  element.textContent = text;
  return element;
}

async function send(text) {
  state.messages.push({ role: "user", content: text });
  const answer = { role: "assistant", content: "", parts: [] };
  const asked = state.messages.map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  if (system) asked.unshift({ role: "system", content: system });
  state.messages.push(answer);
  render();
  const item = $("log").lastElementChild;
  item.setAttribute("aria-busy", "true");
  item.classList.add("writing");
  scrollDown(true);
  begin();
  const precision = chosenPrecision();
  const done = await write({
    running: state.running,
    body: {
      model: state.model,
      messages: asked,
      precision,
      temperature: number("temperature", 0.7),
      max_completion_tokens: number("tokens", 512),
    },
    onBegin() {
      // The slider may have been moved while the message waited for its turn.
      if (chosenPrecision() !== precision) changeWidth();
    },
    onText(piece, width) {
      answer.content += piece;
      const last = answer.parts.at(-1);
      if (last && last[0] === width) last[1] += piece;
      else answer.parts.push([width, piece]);
      item.writer.push(piece, width);
      scrollDown();
    },
    onToken(tokens, width) {
      speed.push(tokens, width);
      if ($("auto").checked) {
        $("width").value = bitsOf(width);
        showWidth(width);
      }
    },
  });
  if (done.error && !answer.content) {
    // Nothing came of it: the message goes back where it can be changed, and does not spoil what follows.
    state.messages.splice(-2);
    render();
    $("prompt").value ||= text;
    fit();
  }
  answer.note = done.note;
  item.append(footnote(done.note));
  item.removeAttribute("aria-busy");
  item.classList.remove("writing");
  scrollDown();
  end(done);
  save();
}

function number(id, fallback) {
  const value = Number($(id).value);
  return $(id).value.trim() && Number.isFinite(value) ? value : fallback;
}

function begin() {
  complain("");
  state.running = { controller: new AbortController(), id: null };
  speed.begin();
  $("send").hidden = true;
  $("stop").hidden = false;
  $("fresh").disabled = true;
}

function end(done) {
  state.running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("fresh").disabled = false;
  if (done.error) complain(done.error);
  announce(`Answer finished: ${done.note}`);
  speed.end(done.speed);
  refresh();
}

function scrollDown(always = false) {
  const view = document.scrollingElement;
  if (always || view.scrollHeight - view.scrollTop - view.clientHeight < 160) view.scrollTop = view.scrollHeight;
}

// ---- compare

async function sendTwice(text) {
  const sides = ["left", "right"].map((side) => ({ side, text: "", width: $(`width-${side}`).value }));
  begin();
  const shared = state.running;
  $("difference").textContent = "";
  let due = false;
  const show = () => {
    due = false;
    const marked = compare(sides[0].text, sides[1].text);
    sides.forEach(({ side }, place) => showMarked($(`text-${side}`), marked[place]));
    return marked;
  };
  const results = await Promise.all(sides.map(async (side) => {
    const place = $(`text-${side.side}`);
    place.replaceChildren();
    place.setAttribute("aria-busy", "true");
    $(`speed-${side.side}`).textContent = "";
    const done = await write({
      body: {
        model: state.model,
        messages: [...($("system").value.trim() ? [{ role: "system", content: $("system").value.trim() }] : []), { role: "user", content: text }],
        precision: side.width,
        temperature: 0,
        max_completion_tokens: number("tokens", 512),
      },
      onText(piece) {
        side.text += piece;
        if (!due) {
          due = true;
          setTimeout(show, 150);
        }
      },
      running: { controller: shared.controller },
    });
    $(`speed-${side.side}`).textContent = done.note;
    place.setAttribute("aria-busy", "false");
    return done;
  }));
  const marked = show();
  const counts = marked.map((pieces) => pieces.filter(([, alone]) => alone).length);
  $("difference").textContent = counts[0] + counts[1] === 0
    ? "Both answers are the same, word for word."
    : `${counts[0]} words are only in ${sides[0].width}, ${counts[1]} only in ${sides[1].width}.`;
  const error = results.find((done) => done.error)?.error ?? null;
  end({ error, note: $("difference").textContent, speed: 0 });
}

function showMarked(element, pieces) {
  const nodes = [];
  for (const [piece, alone] of pieces) {
    if (!alone) {
      nodes.push(document.createTextNode(piece));
      continue;
    }
    const mark = document.createElement("mark");
    mark.textContent = piece;
    nodes.push(mark);
  }
  element.replaceChildren(...nodes);
}

// ---- the page itself

function complain(text) {
  $("alert").textContent = text;
  $("alert").hidden = !text;
}

function announce(text) {
  $("announcement").textContent = text;
}

function save() {
  try {
    sessionStorage.setItem("messages", JSON.stringify(state.messages));
  } catch {
    // More than a browser keeps: the conversation goes on without being kept.
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("messages") ?? "[]");
    if (Array.isArray(kept)) state.messages = kept;
  } catch {
    sessionStorage.removeItem("messages");
  }
  $("key").value = sessionStorage.getItem("key") ?? "";
  for (const id of ["temperature", "tokens", "system"]) $(id).value = sessionStorage.getItem(id) ?? $(id).value;
  render();
}

for (const id of ["key", "temperature", "tokens", "system"]) {
  $(id).addEventListener("change", () => {
    sessionStorage.setItem(id, $(id).value);
    if (id === "key") refresh();
  });
}

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    document.body.dataset.mode = mode();
    $("chat").hidden = mode() !== "chat";
    $("compare").hidden = mode() !== "compare";
    $("fresh").hidden = mode() !== "chat";
    $("prompt").focus();
  });
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || state.running) return;
  if (mode() === "compare" && !$("width-left").value) return; // which widths there are is on its way
  $("prompt").value = "";
  fit();
  if (mode() === "chat") send(text);
  else sendTwice(text);
});

for (const idea of document.querySelectorAll(".idea")) {
  idea.addEventListener("click", () => {
    if (!state.running) send(idea.textContent);
  });
}

$("stop").addEventListener("click", () => {
  state.running?.controller.abort();
  $("prompt").focus();
});

$("fresh").addEventListener("click", () => {
  state.messages = [];
  save();
  render();
  $("prompt").focus();
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown") && !$("auto").checked) {
    event.preventDefault();
    const slider = $("width");
    if (event.key === "ArrowUp") slider.stepUp();
    else slider.stepDown();
    changeWidth();
    announce(`Precision ${name(slider.value)}`);
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.running) state.running.controller.abort();
});

function fit() {
  const prompt = $("prompt");
  prompt.rows = Math.min(8, Math.max(1, prompt.value.split("\n").length));
}

$("prompt").addEventListener("input", fit);
window.addEventListener("pagehide", save);

restore();
refresh();
setInterval(() => speed.tick(), 250);
setInterval(() => { if (!document.hidden) refresh(); }, 3000);
$("prompt").focus();
