// Drives the gateway with OpenAI's Node SDK and prints what it saw as one JSON object.
// usage: node chat.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const request = {
  model,
  messages: [{ role: "user", content: "How many persons may the ferry carry?" }],
  max_tokens: 12,
  temperature: 0,
};

async function failure(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, requestID: error.requestID };
  }
}

const { data: chat, response } = await client.chat.completions.create(request).withResponse();

const stream = await client.chat.completions.create({
  ...request,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}

const abandoned = await client.chat.completions.create({ ...request, max_tokens: 64, stream: true });
for await (const chunk of abandoned) {
  break;
}

const models = [];
for await (const entry of client.models.list()) {
  models.push(entry.id);
}

console.log(
  JSON.stringify({
    chat: chat.choices[0].message.content,
    finishReason: chat.choices[0].finish_reason,
    requestID: chat._request_id,
    replica: response.headers.get("x-gateway-replica"),
    streamed,
    usage,
    models,
    unknownModel: await failure(() => client.chat.completions.create({ ...request, model: "no-such-model" })),
    badBody: await failure(() => client.chat.completions.create({ ...request, model: "" })),
  }),
);
