// Checks of Vercel's AI SDK with its providers for OpenAI's and Anthropic's API, in the folder with its packages:
// `node vercel_client.mjs URL`.
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.cwd(), "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { APICallError, Output, generateText, jsonSchema, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const url = process.argv[2];
const given = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(given);
const compatible = createOpenAICompatible({ ...given, name: "vllm", supportsStructuredOutputs: true });
const anthropic = createAnthropic(given);
const models = {
  compatible: (name) => compatible(name),
  chat: (name) => openai.chat(name),
  responses: (name) => openai.responses(name),
  anthropic: (name) => anthropic(name),
};
const city = { type: "string", enum: ["Paris"] };
const weather = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
const ask = { prompt: "hello", maxOutputTokens: 160, maxRetries: 0 };

function assert(holds, what) {
  if (!holds) throw new Error(what);
}

async function refused(status, call) {
  try {
    await call();
  } catch (error) {
    assert(APICallError.isInstance(error), `no APICallError: ${error}`);
    assert(error.statusCode === status, `status ${error.statusCode}, not ${status}`);
    return;
  }
  throw new Error("no error");
}

const checks = {
  async plain(model) {
    const { text } = await generateText({ ...ask, model: model("tiny") });
    assert(text, "no text");
  },
  async stream(model) {
    let failed;
    const { textStream } = streamText({ ...ask, model: model("tiny"), onError: ({ error }) => (failed = error) });
    let text = "";
    for await (const part of textStream) text += part;
    if (failed) throw failed;
    assert(text, "no text");
  },
  async tools(model) {
    const tools = { weather: tool({ description: "weather", strict: true, inputSchema: jsonSchema(weather) }) };
    const toolChoice = { type: "tool", toolName: "weather" };
    const { toolCalls } = await generateText({ ...ask, model: model("tiny"), tools, toolChoice });
    assert(toolCalls.length === 1 && toolCalls[0].input.city === "Paris", JSON.stringify(toolCalls));
  },
  async json_schema(model) {
    const output = Output.object({ schema: jsonSchema(weather) });
    const found = await generateText({ ...ask, model: model("tiny"), output });
    assert(found.output.city === "Paris", JSON.stringify(found.output));
  },
  async error_unknown_model(model) {
    await refused(404, () => generateText({ ...ask, model: model("nobody") }));
  },
  async error_bad_field(model) {
    await refused(400, () => generateText({ ...ask, model: model("tiny"), topP: 7 }));
  },
  async cancel(model) {
    const abortSignal = AbortSignal.timeout(30);
    let ended = false;
    try {
      await generateText({ ...ask, maxOutputTokens: 64, model: model("tiny"), abortSignal });
    } catch {
      ended = true;
    }
    assert(ended, "not cancelled");
    await checks.plain(model);
  },
};

for (const [api, model] of Object.entries(models))
  for (const [name, check] of Object.entries(checks)) {
    const found = { check: `${api}.${name}`, ok: true };
    try {
      await check(model);
    } catch (error) {
      Object.assign(found, { ok: false, error: `${error.name}: ${error.message}`.slice(0, 300) });
    }
    console.log(JSON.stringify(found));
  }
