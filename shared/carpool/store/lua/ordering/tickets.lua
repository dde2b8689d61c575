-- Tickets: the hash `held` says for each ticket where its request is. This file alone builds and parses its values:
--
--   w ENTRY_ID                    the request is waiting, in this entry of the request stream
--   b BATCH_ID                    the request is in flight, in this batch
--   r KIND TTL_MS KEY PAYLOAD     the result is withheld; KIND, KEY, PAYLOAD and TTL_MS are what `deliver` needs
--
-- (w and b without the space.) README.md in this directory lists the transitions.

local function waiting_in(entry_id) return 'w' .. entry_id end

local function in_flight_in(batch_id) return 'b' .. batch_id end

local function withheld_result(kind, ttl_ms, key, payload)
  return 'r' .. kind .. ' ' .. ttl_ms .. ' ' .. key .. ' ' .. payload
end

local function is_withheld(value) return type(value) == 'string' and string.sub(value, 1, 1) == 'r' end

-- parse_withheld(value): kind, ttl_ms, key and payload of a withheld result.
local function parse_withheld(value)
  local kind, ttl_ms, key, payload_start = string.match(value, '^r(%a+) (%d+) (%S+) ()')
  return kind, ttl_ms, key, string.sub(value, payload_start)
end

-- parse_ticket(value): 'WAITING' and the entry's ID, 'IN_FLIGHT' and the batch's ID, 'WITHHELD', or 'UNKNOWN'.
local function parse_ticket(value)
  if is_withheld(value) then return 'WITHHELD', '' end
  local prefix = type(value) == 'string' and string.sub(value, 1, 1)
  if prefix == 'w' then return 'WAITING', string.sub(value, 2) end
  if prefix == 'b' then return 'IN_FLIGHT', string.sub(value, 2) end
  return 'UNKNOWN', ''
end

-- update_ticket(held, ticket, value): give a ticket a new value. Returns whether the ticket exists and could be
-- changed. A withheld result is never overwritten: a second request with this ticket can only be a forged one.
-- HDEL and HSETNX instead of HSET: under the ACL rules of Redis 6, a role that may use HSET here may use it on every
-- hash that it can write.
-- O(1).
local function update_ticket(held, ticket, value)
  local old = redis.pcall('HGET', held, ticket)
  if type(old) ~= 'string' or is_withheld(old) then return false end
  return redis.pcall('HDEL', held, ticket) == 1 and redis.pcall('HSETNX', held, ticket, value) == 1
end

