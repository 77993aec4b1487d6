// OpenAI's SDK for node, over the chat, completions and responses routes. The working directory has its node_modules.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { default: OpenAI } = require("openai");
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const URL = process.env.SPECRAY_URL;
const KEY = process.env.SPECRAY_KEY;
const MODEL = "smollm2";
const QUESTION = "What is the capital of France?";
const ASKED = [{ role: "user", content: QUESTION }];
const OPTIONS = { model: MODEL, messages: ASKED, max_tokens: 24, temperature: 0 };
const CITIES = ["Paris", "Rome", "Oslo"];
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES }, days: { type: "integer", enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const TOOL = { type: "function", function: { name: "get_weather", parameters: SCHEMA, strict: true } };
const NAMED = { type: "function", function: { name: "get_weather" } };
const Weather = z.object({ city: z.enum(CITIES), days: z.union([z.literal(1), z.literal(2), z.literal(3)]) });

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const chats = client.chat.completions;

async function raw(options = {}) {
  const headers = { "content-type": "application/json", authorization: `Bearer ${KEY}` };
  const body = JSON.stringify({ ...OPTIONS, ...options });
  return (await fetch(`${URL}/v1/chat/completions`, { method: "POST", headers, body })).json();
}

const rawText = async (options) => (await raw(options)).choices[0].message.content;

function isWeather(value) {
  assert.deepEqual(Object.keys(value).sort(), ["city", "days"]);
  assert.ok(CITIES.includes(value.city) && [1, 2, 3].includes(value.days), JSON.stringify(value));
}

const SCENARIOS = {
  async chat_is_the_servers_text() {
    const reply = await chats.create(OPTIONS);
    assert.equal(reply.choices[0].message.content, await rawText());
    assert.match(reply.choices[0].message.content, /Paris/);
  },
  async usage_is_the_servers() {
    const reply = await chats.create(OPTIONS);
    assert.equal(reply.usage.total_tokens, (await raw()).usage.total_tokens);
  },
  async stream_adds_up() {
    const parts = [];
    for await (const chunk of await chats.create({ ...OPTIONS, stream: true })) {
      parts.push(chunk.choices[0].delta.content ?? "");
    }
    assert.ok(parts.length > 1);
    assert.equal(parts.join(""), await rawText());
  },
  async the_stream_helper_ends_with_the_reply() {
    const stream = chats.stream({ ...OPTIONS, stream_options: { include_usage: true } });
    const texts = [];
    stream.on("content", (delta) => texts.push(delta));
    const last = await stream.finalChatCompletion();
    assert.equal(texts.join(""), await rawText());
    assert.equal(last.choices[0].message.content, await rawText());
    assert.equal((await stream.totalUsage()).completion_tokens, (await raw()).usage.completion_tokens);
  },
  async a_seed_repeats_a_sampled_text() {
    const sampled = { temperature: 1, seed: 11, n: 2 };
    const reply = await chats.create({ ...OPTIONS, ...sampled });
    const expected = (await raw(sampled)).choices.map((choice) => choice.message.content);
    assert.deepEqual(reply.choices.map((choice) => choice.message.content), expected);
  },
  async logprobs_are_the_servers() {
    const wanted = { logprobs: true, top_logprobs: 2 };
    const reply = await chats.create({ ...OPTIONS, ...wanted });
    const expected = (await raw(wanted)).choices[0].logprobs.content;
    assert.deepEqual(reply.choices[0].logprobs.content, expected);
  },
  async many_at_once_are_all_answered() {
    const replies = await Promise.all([1, 2, 3, 4].map((seed) => chats.create({ ...OPTIONS, seed, temperature: 1 })));
    const again = await Promise.all([1, 2, 3, 4].map((seed) => rawText({ seed, temperature: 1 })));
    assert.deepEqual(replies.map((reply) => reply.choices[0].message.content), again);
  },
  async completion_is_the_servers() {
    const body = { model: MODEL, prompt: "One, two, three,", max_tokens: 8, temperature: 0 };
    assert.match((await client.completions.create(body)).choices[0].text, /four/);
  },
  async response_is_the_chats_text() {
    const body = { model: MODEL, input: QUESTION, max_output_tokens: 24, temperature: 0 };
    assert.equal((await client.responses.create(body)).output_text, await rawText());
    const stream = client.responses.stream(body);
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    assert.ok(kinds.has("response.output_text.delta"));
    assert.equal((await stream.finalResponse()).output_text, await rawText());
  },
  async tools_make_a_round_trip() {
    const longer = { ...OPTIONS, max_tokens: 64, tools: [TOOL] };
    const { message } = (await chats.create({ ...longer, tool_choice: NAMED })).choices[0];
    const [call] = message.tool_calls;
    isWeather(JSON.parse(call.function.arguments));
    const messages = [...ASKED, message, { role: "tool", tool_call_id: call.id, content: "It is sunny." }];
    const answer = await chats.create({ ...longer, messages, tool_choice: "none" });
    assert.ok(answer.choices[0].message.content);
  },
  async a_streamed_call_adds_up() {
    const stream = chats.stream({
      ...OPTIONS, max_tokens: 64, tools: [TOOL], tool_choice: "required", parallel_tool_calls: false,
    });
    const call = await stream.finalFunctionToolCall();
    assert.equal(call.name, "get_weather");
    isWeather(JSON.parse(call.arguments));
  },
  async the_runner_calls_the_function() {
    const calls = [];
    const run = (argument) => { calls.push(argument); return "It is sunny."; };
    const tool = { type: "function", function: { ...TOOL.function, function: run, parse: JSON.parse } };
    const runner = chats.runTools({ ...OPTIONS, max_tokens: 64, tools: [tool], tool_choice: NAMED });
    await runner.done();
    assert.equal(calls.length, 1);
    isWeather(calls[0]);
  },
  async structured_output_is_parsed() {
    const response_format = zodResponseFormat(Weather, "weather");
    const reply = await chats.parse({ ...OPTIONS, max_tokens: 64, response_format });
    isWeather(reply.choices[0].message.parsed);
    const text = { format: zodTextFormat(Weather, "weather") };
    const body = { model: MODEL, input: QUESTION, max_output_tokens: 64, temperature: 0, text };
    isWeather((await client.responses.parse(body)).output_parsed);
  },
  async models_are_listed() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert.deepEqual(names, [MODEL]);
  },
  async an_aborted_stream_ends() {
    const stream = await chats.create({ ...OPTIONS, max_tokens: 400, stream: true });
    let count = 0;
    for await (const chunk of stream) if (chunk && ++count === 2) stream.controller.abort();
    assert.ok(count < 100);
    assert.equal((await chats.create(OPTIONS)).choices[0].message.content, await rawText());
  },
  async a_client_that_gives_up_times_out() {
    const slow = chats.create({ ...OPTIONS, max_tokens: 1000, ignore_eos: true }, { timeout: 50 });
    await assert.rejects(slow, OpenAI.APIConnectionTimeoutError);
  },
  async errors_are_its_own() {
    const wrong = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "sk-wrong", maxRetries: 0 });
    const cases = [
      [() => wrong.chat.completions.create(OPTIONS), OpenAI.AuthenticationError, 401, /missing or invalid API key/],
      [() => chats.create({ ...OPTIONS, model: "gpt-x" }), OpenAI.NotFoundError, 404, /gpt-x/],
      [() => chats.create({ ...OPTIONS, top_p: 2 }), OpenAI.BadRequestError, 400, /top_p=2/],
      [() => chats.create({ ...OPTIONS, top_p: 2, stream: true }), OpenAI.BadRequestError, 400, /top_p=2/],
    ];
    for (const [call, kind, status, message] of cases) {
      await assert.rejects(call, (error) => {
        assert.ok(error instanceof kind, error.constructor.name);
        assert.equal(error.status, status);
        assert.match(error.message, message);
        return true;
      });
    }
  },
};

const own = JSON.parse(readFileSync(`${process.cwd()}/node_modules/openai/package.json`, "utf8"));
console.log(JSON.stringify({ version: own.version }));
for (const [name, body] of Object.entries(SCENARIOS)) {
  let error = null;
  try {
    await body();
  } catch (caught) {
    error = caught.stack ?? String(caught);
  }
  console.log(JSON.stringify({ scenario: name, error }));
}
process.exit(0);
