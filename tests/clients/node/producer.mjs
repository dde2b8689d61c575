// A producer in Node.js: node-redis and @msgpack/msgpack. REDIS_URL is the address of Redis.
import { randomUUID } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { createClient, RESP_TYPES } from "redis";

const redis = await createClient({ url: process.env.REDIS_URL }).connect();
const waiting = await redis.duplicate().connect(); // a blocking read needs a connection of its own
const binary = waiting.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer }); // replies are read as bytes

const send = (model, fields) => redis.xAdd(`carpool:{${model}}:requests`, "*", fields);
const result = async (model, id) => (await binary.blPop(`carpool:{${model}}:result:${id}`, 10)).element;
const print = (step, facts) => console.log(JSON.stringify({ step, ...facts }));

// 1. One request. Its correlation ID is the entry ID, which XADD returns.
let id = await send("square", { body: "7" });
print("json", { id, envelope: JSON.parse(await result("square", id)) });

// 2. A tensor, in and out.
const data = new Uint8Array(Int16Array.of(1, 2, 3, 4, 5, 6).buffer);
const body = Buffer.from(encode({ datatype: "INT16", shape: [2, 3], data }));
id = await send("transpose", { content_type: "application/msgpack", body });
const envelope = decode(await result("transpose", id));
const tensor = decode(envelope.body);
print("tensor", {
  id,
  sent: body.toString("hex"),
  status: envelope.status,
  datatype: tensor.datatype,
  shape: tensor.shape,
  values: [...new Int16Array(Uint8Array.from(tensor.data).buffer)],
});

// 3. Two hundred requests in flight, and one stream of replies. Requests of one turn are sent together.
const name = `node-${randomUUID()}`;
const numbers = [...Array(200).keys()];
await Promise.all(
  numbers.map((n) => send("square", { reply_to: name, correlation_id: `${name}:${n}`, body: `${n}` })),
);
const answers = new Map();
let last = "0";
while (answers.size < numbers.length) {
  const stream = { key: `carpool:{square}:replies:${name}`, id: last };
  const [{ messages }] = await binary.xRead(stream, { COUNT: 64, BLOCK: 10_000 });
  for (const { id, message } of messages) {
    last = id.toString();
    for (const { correlation_id, body } of decode(message.results)) {
      answers.set(correlation_id, JSON.parse(Buffer.from(body)));
    }
  }
}
print("stream", { reply_to: name, answers: Object.fromEntries(answers) });

// 4. A request that expires while it waits.
id = await send("away", { expiration: "50", body: "1" });
print("expiration", { id, envelope: JSON.parse(await result("away", id)) });

// 5. An invalid request.
id = await send("square", { priority: "11", body: "7" });
print("invalid", { id, envelope: JSON.parse(await result("square", id)) });

// 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with a result.
const removed = await redis.xDel("carpool:{away}:requests", await send("away", { body: "1" }));
id = await send("away", { body: "1" });
await send("away", { withdraw: id });
print("withdrawal", { removed, id, envelope: JSON.parse(await result("away", id)) });

await Promise.all([redis.close(), waiting.close()]);
