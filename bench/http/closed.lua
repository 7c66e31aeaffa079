-- Closed loop for wrk: every request is a prompt of its own, half of it one of 16 shared beginnings.
-- Arguments: bytes of the body, a number no other run of the series uses. Prints one line of JSON.
local size, nonce, count = 0, 0, 0
local heads = {}
local tail = ""
local words = { "river ", "stone ", "cloud ", "engine ", "garden ", "letter ", "silver ", "winter " }

local function text(bytes, seed)
  local parts, length, x = {}, 0, seed
  while length < bytes do
    x = (x * 1103515245 + 12345) % 2147483648
    local word = words[math.floor(x / 65536) % #words + 1]
    parts[#parts + 1] = word
    length = length + #word
  end
  return string.sub(table.concat(parts), 1, bytes)
end

function init(args)
  size, nonce = tonumber(args[1]), args[2]
  local half = math.floor((size - 160) / 2)
  for i = 1, 16 do
    heads[i] = '{"model":"mock","max_tokens":1,"messages":[{"role":"system","content":"' .. text(half, i)
      .. '"},{"role":"user","content":"'
  end
  tail = " " .. text(half, 99) .. '"}]}'
  wrk.headers["content-type"] = "application/json"
end

function request()
  count = count + 1
  return wrk.format("POST", "/v1/chat/completions", nil, heads[count % 16 + 1] .. nonce .. "-" .. count .. tail)
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('JSON {"requests": %d, "seconds": %.6f, "errors": %d, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
