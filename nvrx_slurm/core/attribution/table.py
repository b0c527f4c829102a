"""The table of known failures; `signatures.py` reads it, docs/reference/attribution.md shows it."""

# [class: role, to blame, confidence, remedy, flags], a line "> what to do" where the class has none yet, then one row
# for each signature: name: texts between semicolons ~ pattern. A row goes on in the next line if that is indented.
# Of rules that are equal otherwise, the first one counts.
TABLE = r"""
[gpu-memory-error: cause node certain elsewhere]
> Report the node: its GPU memory is damaged. The job goes on without it where a node is left.
gpu-ecc: uncorrectable ecc error encountered
[gpu-memory-error: cause node certain elsewhere printed]
gpu-xid-memory: nvrm: xid ~ xid \([^)]*\): (48|64|95|140|156)\b
[gpu-memory-error: cause node likely restart printed]
gpu-xid-contained: nvrm: xid ~ xid \([^)]*\): 94\b
[nvlink: cause node certain elsewhere]
> Report the node and its NVLink domain: run `nvidia-smi nvlink -e` there. The job goes on without it.
nvlink-uncorrectable: uncorrectable nvlink error
[nvlink: cause node certain elsewhere printed]
gpu-xid-nvlink: nvrm: xid ~ xid \([^)]*\): (74|136|155)\b
nvswitch-fatal: sxid; nvlink; nvswitch fatal ~
    sxid \([^)]*\): \d+, fatal\b|nvlink.{0,200}recovery failed|nvswitch fatal error
[nvlink: cause node likely restart printed]
gpu-xid-nvlink5: nvrm: xid ~ xid \([^)]*\): (14[4-9]|150), \S+ fatal
[nvlink: unclear node guess restart]
gpu-peer-memory: invalid access of peer gpu memory
[gpu-lost: cause node certain elsewhere printed]
> Report the node: a GPU has left the bus; it comes back only with a reboot or a repair.
gpu-xid: nvrm: xid ~ xid \([^)]*\): (61|62|79|109|110|119|120|143|158)\b
gpu-off-bus: fallen off the bus; gpu is lost ~ nvrm: .*(fallen off the bus|gpu is lost)
[gpu-lost: cause node certain elsewhere]
gpu-gone: gpu is lost; has fallen off the bus
[gpu-lost: cause node likely elsewhere printed]
gpu-no-handle: unable to determine the device handle
[gpu-unavailable: cause node likely elsewhere]
> Check the GPUs of the node with `nvidia-smi`: fabric manager, leftover processes, CUDA_VISIBLE_DEVICES.
gpu-not-initialized: system not yet initialized
gpu-missing: no cuda-capable device is detected; no cuda gpus are available; found no nvidia driver
gpu-busy: devices are busy or unavailable; device(s) is/are busy or unavailable
gpu-no-driver: couldn't communicate with the nvidia driver; cuda unknown error;
    failed to initialize nvml: unknown error; cuda driver initialization failed; unable to initialize backend 'cuda'
[gpu-unavailable: cause node likely elsewhere printed]
gpu-no-init: rminitadapter failed
[gpu-driver: cause node likely elsewhere]
> Use an image for the driver of the node, or have the driver updated or its module loaded again.
gpu-driver: driver/library version mismatch; cuda driver version is insufficient;
    unsupported display driver / cuda driver combination; forward compatibility was attempted on non supported hw;
    driver on your system is too old; compiled with an unsupported toolchain
[node-hardware: cause node certain elsewhere printed]
> Report the node: its kernel says that hardware is broken.
nic-health: health compromised - reached miss count; unrecoverable hardware error
[node-hardware: cause node likely elsewhere printed]
pcie-fatal: aer: ~ aer:.{0,200}uncorrected \(fatal\)|uncorrected \(fatal\).{0,200}aer:
machine-check: mce: [hardware error]; edac; thermal shutdown; hardware memory corruption ~
    error\].*(exception|\buncorrected|\|ue\b|fatal)|edac.*\bue\b|thermal|memory corruption
slurm-memory-error: uncorrectable memory error at
[kernel: cause node likely elsewhere printed]
> Report the node: its kernel or a local disk is stuck.
kernel-lockup: soft lockup; rcu_sched self-detected stall; kernel panic
local-disk: i/o error, dev nvme; i/o error on dev nvme; remounting filesystem read-only; nvme * controller is down
slurm-stepd-stuck: not ending with signals
[host-memory: cause node likely elsewhere printed]
> Look for other programs on the node, and ask Slurm for its memory (--mem).
host-out-of-memory: out of memory: killed process ~ (?<!cgroup )out of memory: killed process
[node-lost: cause node likely elsewhere printed]
> Nothing: the job goes on with the other nodes or a spare.
slurm-node-failure: due to node failure; node failure on ~ slurmstepd.*due to node failure|srun.*node failure on
slurm-launch-failure: task launch for * failed on node
[node-lost: cause node likely restart]
ray-node-lost: because its node has died; nodediederror
[slurm: cause slurm certain none printed]
> Ask for more time, or submit again: Slurm or a person ended the job.
slurm-time-limit: due to time limit
slurm-preempted: due to preemption; job requeue
slurm-cancelled: cancelled at ~ cancelled at (?!.{0,100}due to node failure)
[network: cause network likely restart printed]
> Check the links between the two nodes (ibstat, the fabric's counters); a link that fails twice: report its node.
ib-retry-exceeded: got completion; transport retry counter exceeded; ibv_wc_retry_exc_err ~
    (status=|error )(?!5\b)\d|retry counter|retry_exc
ib-port: got async event; got non-fatal async event ~ port error|port_err|link down
ib-fatal: async event; nccl warn call to ibv_ ~ fatal async event|catastrophic|work queue error|ibv_\w+ failed
no-route-nccl: nccl warn * no route to host; nccl warn * network is unreachable
efa-error: efa_rdm; net/ofi ~ (message: (?!unresponsive)|unreachable remote|rc: (?!113\b)-?\d|completed with error)
[network: cause network likely restart]
ib-call: call to ibv_* failed
[memory-limit: cause user likely restart printed kills]
> Ask for more memory (--mem), or use less: fewer data workers, smaller caches.
cgroup-out-of-memory: oom_kill event; oom-kill event; oom killed; memory cgroup out of memory; exceeded memory limit;
    cgroup out-of-memory handler; : out of memory ~ oom|cgroup|exceeded|srun: error: .*task.*: out of memory
[memory-limit: cause user likely restart]
python-out-of-memory: can't allocate memory; cannot allocate memory; unable to allocate * for an array; bad_alloc
python-memory-error: memoryerror ~ (?<!outof)memoryerror
ray-out-of-memory: running low on memory; ray.exceptions.outofmemoryerror; node_out_of_memory
data-loader-killed: dataloader worker * killed by signal: killed
[shared-memory: cause user likely restart printed]
> Make /dev/shm larger (container: --shm-size or a tmpfs), or use fewer data workers.
data-loader-memory: killed by signal: bus error; insufficient shared memory; out of shared memory
nccl-shared-memory: creating shared memory segment; failed to extend /dev/shm; nccl warn call to posix_fallocate failed
[shared-memory-leftover: cause user likely restart one-node]
> Remove what an earlier run left in /dev/shm and in the local cache of the data set.
streaming-leftover: file exists: '/0; reused local directory
[limits: cause user likely restart printed kills]
> Raise the limits of files and processes (ulimit -n, ulimit -u), or use fewer workers and threads.
native-threads: blas_thread_init: pthread_create; thread creation failed: resource; fork: * resource temporarily
[limits: cause user likely restart]
too-many-files: too many open files; received 0 items of ancdata
too-many-threads: can't start new thread; resource temporarily unavailable
[shared-memory: cause user likely restart]
torch-shared-memory: unable to write to file </torch_; unable to allocate shared memory; unable to resize file </torch_
[device-assert: cause user likely restart printed]
> An index is out of range: check labels, vocabulary and position ids; CUDA_LAUNCH_BLOCKING=1 shows the line.
device-assert-line: assertion ` ~ \.cu:\d+:.* assertion .* failed
[device-assert: cause user likely restart]
device-assert: device-side assert triggered
[gpu-out-of-memory: cause user likely restart printed]
> Use less GPU memory: a smaller batch or sequence, activation checkpointing, or more shards.
nccl-out-of-memory: cuda failure * 'out of memory'; cuda failure 'out of memory'; failed to cuda calloc;
    failed to cuda host alloc
[gpu-out-of-memory: cause user likely restart]
gpu-out-of-memory: cuda out of memory; cuda error: out of memory; torch.outofmemoryerror; hip out of memory;
    torch.cuda.outofmemoryerror; cuda driver error: out of memory; resource_exhausted: out of memory;
    no available memory for the cache blocks
[gpu-out-of-memory: unclear user likely restart]
cublas-memory: cublas_status_alloc_failed
[kernel-image: cause user likely stop]
> Install builds (torch, extensions) for the compute capability of this GPU.
kernel-image: no kernel image is available; device kernel image is invalid
[illegal-access: unclear user guess restart printed]
> A kernel reads or writes out of bounds: CUDA_LAUNCH_BLOCKING=1 shows it. On one GPU only: report that node.
gpu-xid-application: nvrm: xid ~ xid \([^)]*\): (13|31|32|43|45|68|69)\b
[illegal-access: unclear user guess restart]
illegal-access: illegal memory access; misaligned address; unspecified launch failure; illegal instruction was enc;
    hardware stack error; invalid program counter
[compile: cause user likely restart]
> A kernel does not compile or does not fit this GPU: check the versions of torch and triton, or switch compiling off.
triton-resources: outofresources: out of resource
compiler: backendcompilerfailed:; inductorerror:; triton error [cuda]; `ptxas` failed; torch._dynamo.exc.;
    triton.compiler.errors.; error building extension
[collective-mismatch: cause user likely restart]
> The ranks do not call the same collectives: compare branches that depend on the rank, and tensor shapes.
collective-mismatch: op.preamble.length <= op.nbytes; collective mismatch; detected mismatch between collectives;
    ddp expects same model across all ranks
[device-mapping: cause user likely stop printed]
> Give each rank its own GPU: check CUDA_VISIBLE_DEVICES, torch.cuda.set_device and --gpus-per-node.
duplicate-gpu: duplicate gpu detected
[device-mapping: cause user likely stop]
invalid-device: ncclinvalidusage; invalid device ordinal
[interface: cause user likely restart one-node printed]
> Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to an interface that all nodes have.
no-interface: no socket interface found; unable to find address for
[arguments: cause user certain stop]
> Correct the command line of the script.
arguments: error: unrecognized arguments; error: the following arguments are required; error: argument *: invalid;
    error: argument *: expected; error: no such option; error: missing option; error: invalid value for
[checkpoint-mismatch: cause user certain stop]
> Load the checkpoint of this model and this parallel layout, or change the model back.
checkpoint-mismatch: error(s) in loading state_dict; size mismatch for; missing key(s) in state_dict;
    unexpected key(s) in state_dict
[checkpoint-mismatch: cause user likely stop]
checkpoint-key: missing key in checkpoint state_dict; metadataindex(fqn=; shape mismatch for loaded;
    size mismatch between saved; doesn't match the size of optimizer's group
[library: cause user likely restart one-node]
> Install the library in the image, or load its module; on one node only: compare the node with the others.
shared-library: cannot open shared object file; ' not found (required by; failed to open lib
[import: cause user certain stop one-node]
> Install the module in the environment that the job uses, or correct the script.
python-import: modulenotfounderror:; syntaxerror:; indentationerror:
[import: cause user likely restart one-node]
python-import-error: importerror:; undefined symbol:; : no module named
[rejected-result: cause node likely restart printed]
> Megatron-LM computed a step twice. Other result on one GPU, or on another GPU: report that node; else data or code.
rejected-transient: possible transient error!
[rejected-result: cause unknown likely restart printed]
rejected-persistent: possible persistent error!
[rejected-result: cause user likely stop printed]
rejected-application: correct result (but possible application error)
[not-finite: cause user guess restart printed]
> Look at data and learning rate near this step. The same step on other nodes: code or data; else suspect the GPU.
megatron-rerun: rerun_state_machine:unexpected result
[not-finite: cause user guess restart]
not-finite: loss is nan; loss is inf; found nan in; found inf in; unexpected result nan; unexpected result inf;
    loss scale already at minimum; contains a nan; loss was nan; is non-finite; non-finite loss; is nan.; nan or inf;
    contains either `inf`, `nan`; minimum loss scale reached; nan detected; nan/inf; inf or nan; loss is not finite
[access: cause user likely stop]
> Log in: give the job a token (HF_TOKEN, WANDB_API_KEY), or ask for access.
no-access: gated repo; 401 client error; 403 client error; gatedrepoerror; api_key not configured; (accessdenied);
    repositorynotfounderror; nocredentialserror; (expiredtoken)
[service: cause service likely restart]
> Wait, or do without the service: download before the job, and work offline (HF_HUB_OFFLINE=1, WANDB_MODE=offline).
service-limits: 429 client error; too many requests; (slowdown); reduce your request rate
service-away: max retries exceeded; readtimeout; connecttimeout; 503 server error; 502 server error; 504 server error;
    500 server error; couldn't connect to 'http; localentrynotfounderror; could not connect to the endpoint;
    failed with error code 5; service unavailable; temporary failure in name resolution; read timed out;
    newconnectionerror; remotedisconnected; connection aborted.; chunkedencodingerror; incompleteread;
    httpx.connecterror; aiohttp.client_exceptions; urlopen error
[service: cause service guess restart]
service-library: requests.exceptions.; urllib3.exceptions.; httpx.; httpcore.; aiohttp.; botocore.exceptions.;
    google.api_core.exceptions.; azure.core.exceptions.; wandb.errors.
[service: cause service likely restart]
logger-away: run initialization has timed out; wandb.errors.commerror; wandb.errors.errors.commerror
[disk-full: cause user likely restart one-node]
> Free space or ask for more quota, where the job writes: checkpoints, caches, /tmp.
disk-full: no space left on device; disk quota exceeded; storagefull
checkpoint-not-written: pytorchstreamwriter failed; unexpected pos; file write failed
[corrupt-file: cause storage likely restart]
> A file is torn or damaged: resume from an older checkpoint, or fetch the data again.
checkpoint-torn: pytorchstreamreader failed; failed finding central directory; unpicklingerror; ran out of input;
    safetensorerror: error while deserializing
data-torn: corrupt snappy; parquet magic bytes not found; for message body, got; image file is truncated;
    zlib.error:; invalid flatbuffers message; badzipfile; badgzipfile; tarfile.readerror; lzmaerror; checksum;
    compressed file ended before
[storage: cause storage likely restart one-node]
> Check the mounts and the server of the file system; on one node only: report that node.
storage-error: input/output error; stale file handle; transport endpoint is not connected; remote i/o error;
    cannot send after transport endpoint shutdown; read-only file system; no locks available; structure needs cleaning
[storage: cause storage likely restart one-node printed]
storage-away: this client was evicted by; lustreerror; nfs: server ~ evicted|lustreerror|not responding
[storage: unclear storage guess restart printed]
blocked-task: blocked for more than ~ task .*blocked for more than
[port: cause user likely restart one-node]
> Use another port: another program on the first node has this one, perhaps one that an earlier run left.
port-taken: eaddrinuse; address already in use; failed to bind
[file-missing: cause user likely restart one-node]
> Correct the path; on one node only: its file system is not mounted.
file-missing: filenotfounderror:; no such file or directory
[permission: cause user likely restart one-node]
> Correct owner and mode of the file, or the path.
permission: permissionerror:; permission denied
[container: cause user likely stop one-node printed]
> Check image, mounts and entry point; on one node only: report that node.
container: error: pyxis: ; pyxis: couldn't; enroot-mount:; nvidia-container-cli:; oci runtime create failed;
    could not open image; execve():; error response from daemon; manifest unknown; error: initializing source
[network: cause network likely restart one-node]
no-route: no route to host; network is unreachable; host is down
[data-worker: unclear user guess restart]
> Look above for what the data worker printed; num_workers=0 shows its exception.
data-loader-worker: dataloader worker ~ exited unexpectedly|killed by signal
[cuda-library: unclear unknown guess restart]
> CUDA_LAUNCH_BLOCKING=1 shows the call; often memory is short or an index is out of range. Same GPU twice: report it.
cuda-library: cudnn_status_; cublas_status_; cuda error: unknown error; cufft_; cusolver_status;
    the launch timed out and was terminated
cuda-other: cuda error: ; cuda driver error
[nccl-error: unclear unknown guess restart]
> Set NCCL_DEBUG=WARN: NCCL then prints the reason before this error.
nccl-internal: unhandled system error; unhandled cuda error; ncclinternalerror; ncclsystemerror;
    ncclunhandledcudaerror; internal error - please; nccl error * internal error
nccl-other: nccl error ~ nccl error(?!.*remote process exited)
[native-crash: unclear unknown guess restart printed]
> Native code crashed: look at the core file or the stack above; again on the same node only: report that node.
native-crash: segmentation fault; fatal python error: bus; signal 11 (sigsegv); signal sigsegv; exitcode: -11;
    return code = -11; exit code -11; exit code -7; bus error (core; illegal instruction (core;
    floating point exception; fatal python error: illegal; free(): invalid; double free or corruption; malloc():;
    corrupted size vs. prev_size; free invalid pointer; stack smashing detected; signal 7 (sigbus)
[gpu-hang: unclear unknown guess restart printed]
> A CUDA or NCCL call hangs: look at the stacks in this log and at `nvidia-smi` on the node.
watchdog-stuck: watchdog got stuck; heartbeat monitor timed out; processgroupnccl watchdog hang; heartbeat_timeout
[killed: unclear unknown guess restart printed]
> Something killed the process: look for the out-of-memory killer (dmesg, sacct) and for a person's kill.
child-killed: signal 9 (sigkill) received; with signal sigkill; exitcode: -9; return code = -9; exit code -9
[echo: echo unknown likely none printed]
> Look at the other ranks: this one only tells that a peer is gone.
ib-flushed: got completion; ibv_wc_wr_flush_err ~ (status=|error )5\b|flush_err
collective-timeout: watchdog caught collective operation timeout
watchdog-status: failure detected by watchdog at work sequence id; detected by watchdog at work; timeout at nccl work
dump-signal: to signal dumping; observed flight recorder dump signal; received a dump signal
watchdog-abort: some nccl operations have failed or timed out; taking the entire process down;
    watchdog thread terminated with exception
nccl-remote: ncclremoteerror; remote process exited or there was a network error; connection closed by remote peer
efa-peer: unresponsive receiver
gloo-peer: connection closed by peer; connection reset by peer; broken pipe; software caused connection abort;
    timeout caused pair closure
gloo-timeout: timed out waiting; socket timeout; store based barrier; stop_waiting response
monitored-barrier: failed to pass monitoredbarrier; reached monitoredbarrier, but received errors
store-gone: connectfullmesh failed; diststoreerror; client socket has timed out; failed to recv, got;
    rendezvousconnectionerror; rendezvousclosederror; rendezvoustimeouterror; distnetworkerror; store->get;
    client socket has failed to connect
connect-refused: connection refused; connection timed out; socketstartconnect; socketprogress; socket recv failed
nccl-after-error: previous error during capture; nccl warn cuda failure; nccl communicator was aborted
ray-peer: actor died unexpectedly; its worker process has died; actorunavailableerror; workercrashederror
inprocess: rankdiscarded:; storelost:; internalerror: ~ (^|inproc\S*\.)(rankdiscarded|storelost|(?<=n\.)internalerror):
stopped: signalexception; got signal: 15; sigtermexception; received sigterm; closing signal sigterm; keyboardinterrupt
distributed-error: torch.distributed.dist
"""
