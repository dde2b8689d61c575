-- release: deliver withheld results that an earlier script left over, and free lost tickets at the front of the
-- order. A ticket is lost if its request's entry was deleted by XDEL, or its batch by hand: no result will ever come,
-- and the results behind it would be withheld for ever.
--
-- KEYS  1 order   2 tickets; to free lost tickets also 3 requests   4.. batches, streams of versions
-- Returns { 'MORE' }   there is more to do: run it again
--       | { 'EMPTY' }  no tickets are left
--       | { 'FIRST', number of tickets, entry and position of the first one, ID of the entry in which its request is
--           if it waits }
-- O(results delivered + tickets freed), and O(bytes) of the results; with KEYS 3 and 4 also O(bytes) of an entry and
-- of all batches in flight: pass these keys only rarely.
-- GRANT batcher requests xrange
-- GRANT batcher batches xrange
-- GRANT batcher,worker tickets hget hdel
redis.pcall('HDEL', KEYS[2], '') -- must be the first write: see deliver.lua
if release(KEYS[1], KEYS[2], {}) then return { 'MORE' } end

-- The tickets of all batches, as a function: whether a ticket is in flight.
local function read_batches()
  local ranges = {}
  for k = 4, #KEYS do
    local start = '-'
    repeat
      local batches = redis.call('XRANGE', KEYS[k], start, '+', 'COUNT', 16)
      for _, batch in ipairs(batches) do
        local fields = {}
        for f = 1, #batch[2], 2 do fields[batch[2][f]] = batch[2][f + 1] end
        local gone = ' ' .. (fields.gone or '') .. ' '
        for _, run in pairs(fields.tickets and cmsgpack.unpack(fields.tickets) or {}) do
          if not string.find(gone, ' ' .. run[1] .. ' ', 1, true) then
            for r = 2, #run do ranges[#ranges + 1] = run[r] end
          end
        end
        start = '(' .. batch[1]
      end
    until #batches == 0
  end
  return function(entry, position)
    for _, range in ipairs(ranges) do
      if range[1] == entry and range[2] <= position and position < range[2] + range[3] then return true end
    end
    return false
  end
end

local place, freed, is_in_flight = read_order(KEYS[1], KEYS[2]), 0, nil
local reply = { 'MORE' }
while freed < 1000 do
  if not place.entry then
    reply = { 'EMPTY' }
    break
  end
  local value = redis.pcall('HGET', KEYS[2], next_ticket(place))
  if parse_withheld(value) then break end
  local id = parse_waiting(value) or place.entry
  local is_lost = false
  if KEYS[4] and #redis.call('XRANGE', KEYS[3], id, id) == 0 then
    is_in_flight = is_in_flight or read_batches()
    is_lost = not is_in_flight(place.entry, place.position)
  end
  if not is_lost then
    reply = { 'FIRST', 0, place.entry, place.position, id }
    break
  end
  advance(place, 1)
  freed = freed + 1
end
write_order(place)
if reply[1] == 'FIRST' then reply[2] = count_tickets(KEYS[1], KEYS[2]) end
return reply
