import torch, time, sys
sys.path.insert(0,"src")
import normkit as nk
from normkit.engine.backends import use_backend
torch.manual_seed(0)
def rel(a,b): return ((a.double()-b).norm()/b.norm().clamp_min(1e-30)).item()
bad=0
for n in ("bn","gn","ln","in","ghost_bn","input_norm","bgn","rbn","bcn"):
    for dt in (torch.float32,torch.bfloat16,torch.float16):
        for mf in ("c","cl"):
            for shape in ((8,64,14,14),(2,64,7,7),(1,64,133,31),(16,64)):
                if n=="in" and len(shape)==2: continue
                for act in ("none","relu"):
                    m=nk.make(n,64).cuda(); r=nk.make(n,64).cuda().double(); r.load_state_dict(m.state_dict()); t=nk.make(n,64).cuda(); t.load_state_dict(m.state_dict())
                    x=(torch.randn(*shape,device="cuda")*2+.5).to(dt)
                    if mf=="cl" and x.dim()==4: x=x.to(memory_format=torch.channels_last)
                    dy=torch.randn_like(x); res=torch.randn_like(x); outs=[]
                    for mod,xx,b in ((m,x,"auto"),(t,x,"torch"),(r,x.double(),"torch")):
                        with use_backend(b):
                            q=xx.detach().clone(memory_format=torch.preserve_format).requires_grad_(); rr=res.to(xx.dtype).requires_grad_()
                            y=mod(q,rr,act); g=torch.autograd.grad(y,[q,rr,*[p for p in mod.parameters() if p.requires_grad]],dy.to(y.dtype)); outs.append((y,*g,*[bb for bb in mod.buffers() if bb.is_floating_point()]))
                    for k,(o,p,s) in enumerate(zip(*outs)):
                        e,e0=rel(o,s),rel(p,s)
                        if e>2e-6 and e>2*e0: bad+=1; print("WORSE",n,dt,mf,shape,act,k,e,e0)
print("worse than twice torch:",bad)
x=torch.randn(4,8,5,5,device="cuda"); l=nk.BN(8).cuda(); l(x); s0=l.running_mean.clone(); y=x.clone(); y[0,0,0,0]=float("inf"); l(y); print("guard", torch.equal(l.running_mean,s0), l.nonfinite_batches.item(), l.num_batches_tracked.item())
def replay(f,n=20):
    f(); f(); torch.cuda.synchronize(); g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    for _ in range(3): g.replay()
    s,e=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); ts=[]
    for _ in range(5):
        s.record()
        for _ in range(n): g.replay()
        e.record(); e.synchronize(); ts.append(s.elapsed_time(e)/n)
    return sorted(ts)[2]
def host(f,n=200):
    for _ in range(20): f()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): f()
    t1=time.perf_counter()-t; torch.cuda.synchronize(); return t1/n*1e6
for shape in ((128,256,56,56),(128,64,112,112),(128,1024,14,14),(128,64,32,32),(2,256,200,304)):
  for dt,mf in ((torch.bfloat16,"cl"),(torch.float32,"cl"),(torch.bfloat16,"c")):
    x=torch.randn(*shape,device="cuda",dtype=dt)
    if mf=="cl": x=x.to(memory_format=torch.channels_last)
    x.requires_grad_(); dy=torch.randn_like(x); floor=8*x.numel()*x.element_size()/4.26e12*1e3
    out=[]
    for n in ("torch bn","bn","gn","ln","in","bgn","iebn","rbn","bcn","sn"):
        m=(torch.nn.BatchNorm2d(shape[1]) if n=="torch bn" else nk.make(n,shape[1])).cuda(); w=[x,*m.parameters()]
        f=lambda: torch.autograd.grad(m(x),w,dy)
        out.append(f"{n} {replay(f)/floor:.2f}")
    print(shape,str(dt)[6:],mf,f"floor {floor:.3f}:"," ".join(out))
x=torch.randn(8,64,8,8,device="cuda").to(memory_format=torch.channels_last).requires_grad_(); dy=torch.randn_like(x)
for n in ("torch bn","torch gn","bn","gn","in","rbn","bcn"):
    m={"torch bn":torch.nn.BatchNorm2d(64),"torch gn":torch.nn.GroupNorm(32,64)}.get(n) or nk.make(n,64); m=m.cuda(); w=[x,*m.parameters()]
    print("host us per step",n,round(host(lambda: torch.autograd.grad(m(x),w,dy))))
import torchvision
def train(norm,batch=256,steps=12):
    torch.manual_seed(0)
    net=torchvision.models.resnet50(norm_layer=norm).cuda().to(memory_format=torch.channels_last); opt=torch.optim.SGD(net.parameters(),lr=.01,momentum=.9)
    x=torch.randn(batch,3,224,224,device="cuda").to(memory_format=torch.channels_last); t=torch.randint(0,1000,(batch,),device="cuda")
    def step():
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda",torch.bfloat16): loss=torch.nn.functional.cross_entropy(net(x),t)
        loss.backward(); opt.step()
    for _ in range(4): step()
    torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); s=time.perf_counter()
    for _ in range(steps): step()
    torch.cuda.synchronize(); return round(batch*steps/(time.perf_counter()-s)), round(torch.cuda.max_memory_allocated()/2**30,1)
base=None
for name,norm in (("cudnn bn",torch.nn.BatchNorm2d),("bn",nk.BN),("gn",nk.GN),("ln",nk.LN),("in",nk.IN),("bgn",nk.BGN),("rbn",nk.RBN),("bcn",nk.BCN)):
    r=train(norm); base=base or r[0]; print("resnet50",name,r,f"{r[0]/base:.2f}x")
