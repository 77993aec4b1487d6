// What the page shows, without the page: streams, answers, draft trees, and metrics. page.js draws it.

/** The JSON objects of a stream of server-sent events. Throws the server's error, or one for a stream that breaks off. */
export async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(body)) {
    const parts = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  throw new Error("The connection was lost before the answer was complete.");
}

async function* chunks(body) {
  const reader = body.getReader(); // not every browser iterates streams
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {}); // the server stops if the answer is not read to its end
  }
}

/** One answer so far. A pass is a step of the model: a tree that it verified, and the tokens that came of it. */
export class Answer {
  content = ""; // without reasoning and tool calls, which some servers send in fields of their own
  passes = [];
  finishReason = null;
  #texts = []; // by token
  #times = []; // [milliseconds, tokens so far] of the first and the latest token

  /** Add a chunk of the stream, which arrived at `now` milliseconds. Returns its tokens. */
  add(choice, now) {
    this.content += choice.delta.content ?? "";
    this.finishReason ??= choice.finish_reason;
    const { tokens = [], steps = [] } = choice.trace ?? {};
    this.passes.push(...steps);
    for (const { index, text } of tokens) this.#texts[index] = (this.#texts[index] ?? "") + text;
    if (tokens.length) this.#times = [this.#times[0] ?? [now, this.numTokens], [now, this.numTokens]];
    return tokens;
  }

  /** All that the model wrote. */
  get text() {
    return this.#texts.join("");
  }

  get numTokens() {
    return this.#texts.length;
  }

  /** Tokens per pass, the model's own included, over the passes after the first one, which only reads the prompt. */
  get acceptLength() {
    const later = this.passes.slice(1);
    return later.length ? later.reduce((sum, pass) => sum + this.numKept(pass), 0) / later.length : null;
  }

  /** The tokens of a pass that are part of the answer: all of them, unless the answer ended among them. */
  numKept(pass) {
    const made = pass.accepted.length + 1;
    return this.finishReason === null ? made : Math.min(made, this.numTokens - pass.index);
  }

  /** Tokens per second since the first one; null before there is a second. */
  get speed() {
    if (this.#times.length === 0 || this.#times[0][0] === this.#times[1][0]) return null;
    const [[start, first], [end, last]] = this.#times;
    return (1000 * (last - first)) / (end - start);
  }

  /** The text of the token that the model added itself in a pass: empty while it is held back, null if it was cut. */
  ownToken(pass) {
    if (this.numKept(pass) <= pass.accepted.length) return null;
    return this.#texts[pass.index + pass.accepted.length] ?? "";
  }

  /** The number of the last pass that had drafts, or of the last one. */
  get lastDrafted() {
    const place = this.passes.findLastIndex((pass) => pass.tokens.length > 1);
    return place < 0 ? this.passes.length - 1 : place;
  }

  /** The number of the pass that token `index` came from. */
  passOf(index) {
    return this.passes.findLastIndex((pass) => pass.index <= index);
  }
}

/**
 * The nodes of a pass's tree, at most `limit`, accepted ones first. Each has its depth, its row from the top, the node
 * it hangs on, and a kind: root, accepted, rejected, or own for the model's token. Accepted paths are a straight line.
 * Accepted drafts after the end of the answer count as rejected, and `ownText` is null if the model's token is there.
 */
export function treeLayout(pass, ownText, numKept = pass.accepted.length, limit = 32) {
  const accepted = new Set(pass.accepted.slice(0, numKept));
  const nodes = pass.tokens.map((text, i) => {
    const kind = i === 0 ? "root" : accepted.has(i) ? "accepted" : "rejected";
    return { text, kind, parent: null, depth: 0, row: 0, children: [] };
  });
  const own = { text: ownText, kind: "own", parent: null, depth: 0, row: 0, children: [] };
  const hasOwn = ownText !== null;
  const kept = [];
  let room = limit - accepted.size - Number(hasOwn);
  nodes.forEach((node, i) => {
    const parent = nodes[pass.parents[i]];
    if (i && !kept.includes(parent)) return;
    if (node.kind === "rejected" && room-- <= 0) return;
    kept.push(node);
    attach(node, parent);
  });
  if (hasOwn) {
    attach(own, nodes[pass.accepted.at(-1) ?? 0]);
    kept.push(own);
  }
  let rows = 0;
  const place = (node, row) => {
    node.row = row;
    node.children.sort((a, b) => (a.kind === "rejected") - (b.kind === "rejected"));
    node.children.forEach((child, i) => place(child, i === 0 ? row : ++rows));
  };
  place(nodes[0], 0);
  return { nodes: kept, numRows: rows + 1, numHidden: nodes.length + Number(hasOwn) - kept.length };
}

function attach(node, parent) {
  if (!parent) return;
  node.parent = parent;
  node.depth = parent.depth + 1;
  parent.children.push(node);
}

/** What happened in a pass of which `numKept` tokens are part of the answer, in a sentence. */
export function passSentence(pass, numKept = pass.accepted.length + 1) {
  const drafted = pass.tokens.length - 1;
  if (drafted === 0) return "Nothing was drafted: the model wrote 1 token in this pass.";
  const kept = pass.accepted.length;
  if (numKept <= kept) return `${drafted} drafted, ${kept} accepted: ${count(numKept, "token")} up to the end of the answer.`;
  return `${drafted} drafted, ${kept} accepted, and 1 of the model’s own: ${count(kept + 1, "token")} in one pass.`;
}

export function count(number, noun, plural = `${noun}s`) {
  return `${number} ${number === 1 ? noun : plural}`;
}

/** The place of the first character in which two texts differ; null if they are equal. */
export function firstDifference(one, other) {
  if (one === other) return null;
  const [ours, theirs] = [[...one], [...other]];
  const place = ours.findIndex((character, i) => character !== theirs[i]);
  return place < 0 ? ours.length : place;
}

/** How one speed compares with the plain one, as words that follow a sentence; none if either is not known. */
export function speedUp(speed, plainSpeed) {
  if (!speed || !plainSpeed) return { isSlower: false, words: "" };
  const isSlower = speed < plainSpeed;
  return { isSlower, words: `, ${isSlower ? "but only " : ""}${(speed / plainSpeed).toFixed(2)} times as fast with it` };
}

const COLUMNS = {
  specray_num_requests_running: "running",
  specray_num_requests_waiting: "queue",
  specray_draft_faults_total: "faults",
  specray_late_drafts_total: "late",
  specray_verify_steps_total: "steps",
  specray_spec_decode_num_accepted_tokens_total: "accepted",
};

/** Counts by replica, summed over other labels, from Prometheus' text format. */
export function replicaCounts(text) {
  const replicas = new Map();
  for (const [, name, labels, value] of text.matchAll(/^(\w+)\{(.*)\} (\S+)$/gm)) {
    const replica = /(?:^|,)replica="([^"]*)"/.exec(labels)?.[1];
    if (replica === undefined || !(name in COLUMNS)) continue;
    if (!replicas.has(replica)) replicas.set(replica, { running: 0, queue: 0, faults: 0, late: 0, steps: 0, accepted: 0 });
    replicas.get(replica)[COLUMNS[name]] += Number(value);
  }
  return replicas;
}

/** The accept length since `before`, or since the start if the replica was idle; null without a pass. */
export function acceptLengthSince(now, before) {
  const past = before && now.steps > before.steps ? before : { steps: 0, accepted: 0 };
  return now.steps > past.steps ? 1 + (now.accepted - past.accepted) / (now.steps - past.steps) : null;
}
