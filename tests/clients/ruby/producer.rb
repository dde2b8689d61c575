# A producer in Ruby: the gems redis and msgpack. REDIS_URL is the address of Redis; redis-rb reads it.
require "json"
require "msgpack"
require "redis"
require "securerandom"

REDIS = Redis.new

def send_to(model, **fields) = REDIS.xadd("carpool:{#{model}}:requests", fields)
def result(model, id) = REDIS.blpop("carpool:{#{model}}:result:#{id}", timeout: 10).last
def report(step, **facts) = puts({ step:, **facts }.to_json)

# 1. One request. Its correlation ID is the entry ID, which XADD returns.
id = send_to("square", body: 7)
report("json", id:, envelope: JSON.parse(result("square", id)))

# 2. A tensor, in and out. Array#pack returns a binary string, which msgpack packs as bytes.
matrix = { datatype: "INT16", shape: [2, 3], data: [1, 2, 3, 4, 5, 6].pack("s<*") }.to_msgpack
id = send_to("transpose", content_type: "application/msgpack", body: matrix)
envelope = MessagePack.unpack(result("transpose", id))
tensor = MessagePack.unpack(envelope["body"])
report("tensor", id:, sent: matrix.unpack1("H*"), status: envelope["status"], datatype: tensor["datatype"],
                 shape: tensor["shape"], values: tensor["data"].unpack("s<*"))

# 3. Two hundred requests in flight, and one stream of replies.
name = "ruby-#{SecureRandom.uuid}"
REDIS.pipelined do |pipeline|
  200.times do |n|
    pipeline.xadd("carpool:{square}:requests", { reply_to: name, correlation_id: "#{name}:#{n}", body: n })
  end
end
replies = "carpool:{square}:replies:#{name}"
answers = {}
last = "0"
while answers.size < 200
  REDIS.xread(replies, last, count: 64, block: 10_000).fetch(replies).each do |entry_id, fields|
    last = entry_id
    MessagePack.unpack(fields["results"]).each do |one|
      answers[one["correlation_id"]] = JSON.parse(one["body"])
    end
  end
end
report("stream", reply_to: name, answers:)

# 4. A request that expires while it waits.
id = send_to("away", expiration: 50, body: 1)
report("expiration", id:, envelope: JSON.parse(result("away", id)))

# 5. An invalid request.
id = send_to("square", priority: 11, body: 7)
report("invalid", id:, envelope: JSON.parse(result("square", id)))

# 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with a result.
removed = REDIS.xdel("carpool:{away}:requests", send_to("away", body: 1))
id = send_to("away", body: 1)
send_to("away", withdraw: id)
report("withdrawal", removed:, id:, envelope: JSON.parse(result("away", id)))
