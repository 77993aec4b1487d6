// The page: a chat whose tokens show how they came about. Text from the model is only ever set as text, never as HTML.

import { askAgain, askForKey, call } from "./api.js";
import {
  Answer, acceptLengthSince, count, events, firstDifference, passSentence, replicaCounts, speedUp, treeLayout,
} from "./decoding.js";

const POLL_MS = 2000;
const REDRAW_MS = 120; // slow enough for the eye
const DEEPEST = 5; // colour

const EXAMPLE = {
  tokens: ["The", " capital", " of", " the", " city", " cat"], parents: [-1, 0, 1, 2, 1, 0], accepted: [1, 2],
};

const $ = (id) => document.getElementById(id);
const number = (value, digits = 0) => (value === null ? "–" : value.toFixed(digits));

const messages = []; // the conversation so far
let running = null; // AbortController of the answer that is being made
let isExact = false; // whether the server promises one text for one seed
let shown = null; // { answer, box }: the answer that the panels describe
const answers = new WeakMap(); // by the element with its text

// The conversation

/** Put a question, show the answer as it comes and, if wanted, once more without speculation. */
async function ask(question) {
  askAgain();
  const settings = readSettings();
  const compares = $("compare").checked;
  $("start")?.remove();
  add($("log"), "p", "question", question);
  const row = add($("log"), "div", "runs");
  follow();
  messages.push({ role: "user", content: question });
  running = new AbortController();
  setBusy(true);
  try {
    const answer = await run(row, compares ? "with speculation" : "", true, settings);
    if (compares) {
      const plain = await run(row, "without speculation", false, settings);
      compare(row, answer, plain);
    }
    messages.push({ role: "assistant", content: answer.content });
  } catch (error) {
    messages.pop(); // the question can be put again
    const reason = error.name === "AbortError" ? "Stopped." : error.message;
    add($("log"), "p", "failure", reason).setAttribute("role", "alert");
  } finally {
    running = null;
    clearTimeout(redraw);
    redraw = 0;
    setBusy(false);
    if (shown) drawPass(shown.answer.lastDrafted);
    follow();
  }
}

function readSettings() {
  const seed = $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number($("seed").value);
  return { temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value), seed };
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("log").setAttribute("aria-busy", String(isBusy)); // read out once, when the answer is complete
}

/** One answer in a box of its own. */
async function run(row, title, isSpeculating, settings) {
  const box = add(row, "article", "run");
  if (title) add(box, "h3", "", title);
  const text = add(box, "div", "text");
  const note = add(box, "p", "note");
  const answer = new Answer();
  answers.set(text, answer);
  if (isSpeculating) show(text);
  const speculative = isSpeculating ? { trace: true } : { trace: true, enabled: false };
  const body = JSON.stringify({ ...settings, messages, stream: true, speculative });
  const headers = { "Content-Type": "application/json" };
  const response = await call("v1/chat/completions", { method: "POST", headers, body, signal: running.signal });
  for await (const event of events(response.body)) {
    const [choice] = event.choices;
    if (!choice) continue;
    const follows = isAtEnd();
    text.append(...answer.add(choice, performance.now()).map(token));
    const passes = count(answer.passes.length, "pass", "passes");
    note.textContent = `${number(answer.speed)} tokens/s, ${passes} for ${count(answer.numTokens, "token")}`;
    if (isSpeculating) redrawSoon();
    if (follows) follow();
  }
  if (answer.finishReason === "length") note.textContent += "; cut at the limit";
  return answer;
}

function token({ index, text, depth }) {
  const span = document.createElement("span");
  span.className = `t ${depthClass(depth)}`;
  span.textContent = text;
  span.dataset.index = index;
  span.title = depth === null ? "made by an engine that has since failed"
    : depth === 0 ? "the model’s own token" : `draft accepted at depth ${depth}`;
  return span;
}

function depthClass(depth) {
  return `d${Math.min(depth ?? 0, DEEPEST)}`;
}

function compare(row, answer, plain) {
  const place = firstDifference(answer.text, plain.text);
  const { isSlower, words } = speedUp(answer.speed, plain.speed);
  const comparison = place === null
    ? `Identical: ${count([...answer.text].length, "character")}, the same with and without speculation${words}.`
    : `The texts differ from character ${place + 1} on. ${isExact ? "This is an error: please report it."
      : "This server does not promise one text for one seed."}`;
  const kind = place !== null ? "differs" : isSlower ? "same slower" : "same";
  add(row, "p", `comparison ${kind}`, comparison).setAttribute("role", "status");
}

function add(parent, tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

/** Whether the end of the conversation is in view, so that the view should follow it. */
function isAtEnd() {
  return $("log").getBoundingClientRect().bottom < innerHeight + 40;
}

function follow() {
  $("log").lastElementChild?.scrollIntoView({ block: "end" });
}

// The panels

let redraw = 0;

function show(box) {
  shown?.box.querySelectorAll(".on").forEach((span) => span.classList.remove("on"));
  shown = { answer: answers.get(box), box };
}

function redrawSoon() {
  redraw ||= setTimeout(() => {
    redraw = 0;
    drawPass(shown.answer.passes.length - 1);
  }, REDRAW_MS);
}

/** Describe the answer, and draw one of its passes. */
function drawPass(place) {
  const { answer, box } = shown;
  $("accept-length").textContent = number(answer.acceptLength, 2);
  $("speed").textContent = number(answer.speed);
  $("passes").textContent = answer.passes.length;
  $("for-tokens").textContent = `for ${count(answer.numTokens, "token")}`;
  const pass = answer.passes[place];
  if (!pass) return;
  Object.assign($("step"), { disabled: false, max: answer.passes.length, value: place + 1 });
  $("tree-title").textContent = `Draft tree, pass ${place + 1} of ${answer.passes.length}`;
  const numKept = answer.numKept(pass);
  const hidden = drawTree($("tree"), treeLayout(pass, answer.ownToken(pass), numKept));
  $("tree-caption").textContent = passSentence(pass, numKept) + (hidden ? ` ${count(hidden, "rejected node")} not drawn.` : "");
  for (const span of box.children) {
    const offset = span.dataset.index - pass.index;
    span.classList.toggle("on", !running && offset >= 0 && offset <= pass.accepted.length);
  }
}

const ROW = 30;
const GAP = 20;

/** Draw a tree from left to right. Returns how many nodes were left out. */
function drawTree(svg, { nodes, numRows, numHidden }) {
  const labels = new Map(nodes.map((node) => [node, label(node.text)]));
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, 14 + 7.3 * labels.get(node).length);
  const starts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 1));
  const width = starts.at(-1) + widths.at(-1) + 1;
  svg.setAttribute("viewBox", `0 0 ${width} ${numRows * ROW}`);
  svg.style.setProperty("--width", `${width}px`);
  const edges = nodes.filter((node) => node.parent).map((node) => {
    const [x, y] = [starts[node.parent.depth] + widths[node.parent.depth], node.parent.row * ROW + 14];
    const [endX, endY] = [starts[node.depth], node.row * ROW + 14];
    const middle = (x + endX) / 2;
    return shape("path", { class: `edge ${node.kind}`, d: `M${x} ${y}C${middle} ${y} ${middle} ${endY} ${endX} ${endY}` });
  });
  const boxes = nodes.flatMap((node) => {
    const kind = node.kind === "accepted" ? `accepted ${depthClass(node.depth)}` : node.kind;
    const [x, y, w] = [starts[node.depth], node.row * ROW + 2, widths[node.depth]];
    const text = shape("text", { class: node.kind, x: x + w / 2, y: y + 16 });
    text.textContent = labels.get(node);
    return [shape("rect", { class: `node ${kind}`, x, y, width: w, height: 24, rx: 6 }), text];
  });
  svg.replaceChildren(...edges, ...boxes);
  return numHidden;
}

function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A token as a short label: spaces and line ends are visible. */
function label(text) {
  const visible = text.replaceAll(" ", "·").replaceAll("\n", "⏎");
  return visible.length > 12 ? `${visible.slice(0, 11)}…` : visible || "…";
}

let lastCounts = new Map();

async function updateReplicas() {
  const counts = replicaCounts(await (await call("metrics")).text());
  const rows = [...counts].sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, now]) => {
    const row = document.createElement("tr");
    const length = number(acceptLengthSince(now, lastCounts.get(name)), 2);
    const short = name.split("#").at(-1);
    add(row, "th", "", short).scope = "row";
    for (const cell of [now.running, now.queue, length, now.late, now.faults]) add(row, "td", "", String(cell));
    return row;
  });
  lastCounts = counts;
  $("replicas").replaceChildren(...rows);
  $("replicas").parentElement.hidden = rows.length === 0;
  $("replicas-note").textContent = rows.length ? "" : "No engine is connected.";
}

async function pollReplicas() {
  if (!document.hidden) {
    await updateReplicas().catch((error) => {
      $("replicas").parentElement.hidden = true;
      $("replicas-note").textContent = error.message;
    });
  }
  setTimeout(pollReplicas, POLL_MS);
}

/** Show the model's name and drafting method, once an engine is connected. */
async function connect() {
  try {
    const { model, algorithm, drafters, output } = await (await call("v1/speculation/capabilities")).json();
    isExact = output.one_seed_one_text;
    const names = algorithm ?? Object.keys(drafters ?? {}).join(", ");
    $("model").textContent = `${model}, ${names ? `drafts by ${names}` : "no drafter"}`;
  } catch (error) {
    $("model").textContent = error.message;
    setTimeout(connect, POLL_MS);
  }
}

// The controls

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("prompt").value.trim();
  if (!question || running) return;
  $("prompt").value = "";
  ask(question);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("log").addEventListener("click", ({ target }) => {
  if (target.matches(".try") && !running) ask(target.textContent);
  const index = target.dataset.index;
  if (index === undefined || running) return;
  show(target.parentElement);
  drawPass(shown.answer.passOf(Number(index)));
});

$("step").addEventListener("input", ({ target }) => drawPass(target.value - 1));
$("stop").addEventListener("click", () => running?.abort());
$("change-key").addEventListener("click", () => askForKey("Use another API key"));
$("clear").addEventListener("click", () => {
  if (running) return;
  messages.length = 0;
  shown = null;
  $("log").replaceChildren();
});

drawTree($("tree"), treeLayout(EXAMPLE, " France"));
$("tree-caption").textContent = passSentence(EXAMPLE);
connect();
pollReplicas();
