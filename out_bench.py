import os, sys, time
from datetime import timedelta
from multiprocessing import get_context
import torch.distributed as dist
S=1.0
def loop(store, op, i):
    keys=[f"b/{i}/{k}" for k in range(64)]; vals=["7"*32]*64
    store.multi_set(keys, vals); store.add(f"c{i}",1)
    fs={
     "set": lambda: store.set(keys[0], "7"*32),
     "get": lambda: store.get(keys[0]),
     "add": lambda: store.add(f"c{i}",1),
     "check": lambda: store.check([keys[0]]),
     "cas": lambda: store.compare_set(keys[1],"x","y"),
     "multi_set": lambda: store.multi_set(keys, vals),
     "multi_get": lambda: store.multi_get(keys),
     "multi_both": lambda: (store.multi_set(keys, vals), store.multi_get(keys)),
    }
    f=fs[op]
    t=time.perf_counter(); n=0
    while time.perf_counter()-t<S:
        f(); n+=1
    if op in("set","multi_set"): store.check(keys[:1])
    return n/(time.perf_counter()-t)
def child(port, op, i, q, b):
    st=dist.TCPStore("127.0.0.1",port,is_master=False)
    b.wait()
    if op=="ping":
        pair, side = i//2, i%2
        b.wait(); t=time.perf_counter()
        for r in range(1000):
            if side==0: st.set(f"p{pair}/{r}/0","")
            st.wait([f"p{pair}/{r}/{1-side}"])
            if side==1: st.set(f"p{pair}/{r}/1","")
        q.put(1000/(time.perf_counter()-t) if side==0 else 0); return
    b.wait(); q.put(loop(st,op,i))
ctx=get_context("fork")
srv_port=int(sys.argv[1])
def server(port, q):
    st=dist.TCPStore("127.0.0.1",port,is_master=True,wait_for_workers=False); q.put(1); time.sleep(1000)
q=ctx.Queue(); s=ctx.Process(target=server,args=(srv_port,q)); s.start(); q.get()
for n in (1,8):
    for op in ["set","get","add","check","cas","multi_set","multi_get","multi_both","ping"]:
        m = n*2 if op=="ping" else n
        b=ctx.Barrier(m); 
        ps=[ctx.Process(target=child,args=(srv_port,op,i,q,b)) for i in range(m)]
        [p.start() for p in ps]; r=[q.get() for _ in ps]; [p.join() for p in ps]
        print(n,op,round(sum(r)), flush=True)
s.kill()
