-- dispatch: waiting requests leave the request stream and become batches, all or nothing.
--
-- An entry that is no longer there was withdrawn, or taken by another batcher: its requests do not ride, and
-- each batch that was formed with some of them names it in a field `gone`. So a request is dispatched at most
-- once, whoever dispatches, and a batch of 32 does not start over because one producer left.
--
-- KEYS  1 requests   2 batches   3 held
-- ARGV  E, then E entry IDs
--       P, then P times: index of an entry of which some requests stay, their payload, arrival (ms) and tickets
--       B, then B times: number of its entries, their indexes, number of field strings, the fields, number of
--          tickets, and for each: the index of the request's entry, the ticket
-- Returns { IDs that were gone }, { new entry ID for each of P, '' if gone }, { batch ID for each of B, '' if
--       all of it was gone }
-- O(entries), and O(bytes) for the payloads.
local at = 1
local function take()
  local value = ARGV[at]
  at = at + 1
  return value
end

local ids, is_gone, gone = {}, {}, {}
for i = 1, tonumber(take()) do
  ids[i] = take()
  if redis.call('XDEL', KEYS[1], ids[i]) == 0 then
    is_gone[i] = true
    gone[#gone + 1] = ids[i]
  end
end

local stayed = {}
for p = 1, tonumber(take()) do
  local index, payload, arrival_ms, tickets = tonumber(take()), take(), take(), take()
  stayed[p] = is_gone[index] and '' or put_back(KEYS[1], KEYS[3], payload, arrival_ms, tickets)
end

local batches = {}
for b = 1, tonumber(take()) do
  local missing, of = {}, tonumber(take())
  for _ = 1, of do
    local index = tonumber(take())
    if is_gone[index] then missing[#missing + 1] = ids[index] end
  end
  local fields = {}
  for f = 1, tonumber(take()) do fields[f] = take() end
  batches[b] = ''
  if #missing < of then
    if #missing > 0 then
      fields[#fields + 1] = 'gone'
      fields[#fields + 1] = table.concat(missing, ' ')
    end
    batches[b] = redis.call('XADD', KEYS[2], '*', unpack(fields))
  end
  for _ = 1, tonumber(take()) do
    local index, ticket = tonumber(take()), take()
    if not is_gone[index] then move(KEYS[3], ticket, 'b' .. batches[b]) end
  end
end

return { gone, stayed, batches }
