-- Which requests have been answered already: they were sent again after their result was written.
-- GRANT batcher result lindex

-- Reading a result copies it. A producer may have sent many large ones again.
local READ_BYTES_MAX = 16 * 1024 * 1024

-- answered_reader(): a function that tells whether the newest element of a list is an OK result. From its second
-- READ_BYTES_MAX on it says no, and the request is executed again.
-- An envelope begins with the correlation ID and the status, in JSON and in msgpack. An ID has neither a quotation mark
-- nor a control character, so it cannot look like a status.
-- O(bytes) of the result.
local function answered_reader()
  local read_bytes = 0
  return function(key)
    if read_bytes > READ_BYTES_MAX then return false end
    local result = redis.pcall('LINDEX', key, -1)
    if type(result) ~= 'string' then return false end
    read_bytes = read_bytes + #result
    local head = string.sub(result, 1, 1024)
    return (string.find(head, '"status":"OK"', 1, true) or string.find(head, '\166status\162OK', 1, true)) ~= nil
  end
end
